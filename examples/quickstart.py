"""Fine-tune a small real language model in 4 bit, on a CPU or a GPU: free-text orders become strict JSON.

    python examples/quickstart.py [--smoke]

The base model cannot do the task at all. After a few minutes on two CPU cores it does it for items, names, cities, numbers and
phrasings that it was never trained on. The trainer is TRL's own. `--smoke` runs the same on a handful of rows.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from matplotlib.figure import Figure
from orders import HELD_OUT, TRAINED, orders
from smollm2 import smollm2
from tqdm import tqdm
from trl import SFTConfig, SFTTrainer

from fastlm import FastLanguageModel, report


def answer(model, tokenizer, rows: list[dict[str, str]], batch_size: int = 50) -> list[str]:
    """What the model writes after each prompt, greedily."""
    FastLanguageModel.for_inference(model)
    texts = []
    for start in tqdm(range(0, len(rows), batch_size), desc="generating", leave=False):
        prompts = [row["prompt"] for row in rows[start : start + batch_size]]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        output = model.generate(**batch, max_new_tokens=48, do_sample=False)
        texts += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def exact_match(texts: list[str], rows: list[dict[str, str]]) -> float:
    return 100 * sum(text == row["completion"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/quickstart"))
    parser.add_argument("--model", help="folder or hub id; by default SmolLM2-135M-Instruct")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    steps, batch_size, n_held_out = (2, 2, 4) if options.smoke else (40, 16, 100)
    train, held_out = orders(TRAINED, steps * batch_size, options.seed), orders(HELD_OUT, n_held_out, options.seed)

    model, tokenizer = FastLanguageModel.from_pretrained(
        options.model or smollm2(), max_seq_length=128, load_in_4bit=True, random_state=options.seed
    )
    before = exact_match(answer(model, tokenizer, held_out), held_out)
    print(f"exact match before: {before:.1f} %", flush=True)

    # bfloat16, or float16 on a GPU without it
    is_bf16 = model.dtype is torch.bfloat16
    # by default on every linear layer
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, random_state=options.seed)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(train),
        args=SFTConfig(
            output_dir=str(options.output), max_steps=steps, per_device_train_batch_size=batch_size, max_length=128,
            learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=steps // 10, logging_steps=1, seed=options.seed,
            bf16=is_bf16, fp16=not is_bf16, use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False, save_strategy="no", report_to="none",
        ),
    )  # fmt: skip
    trainer.train()
    print(report(model))
    texts = answer(model, tokenizer, held_out)
    after = exact_match(texts, held_out)
    print(f"exact match after: {after:.1f} %", flush=True)

    model.save_pretrained(options.output / "adapter")
    tokenizer.save_pretrained(options.output / "adapter")
    model.save_pretrained_merged(options.output / "merged", tokenizer, save_method="merged_16bit")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="training loss", yscale="log")
    axes.plot(range(1, len(losses) + 1), losses)
    figure.savefig(options.output / "loss.png", dpi=120)

    model, tokenizer = FastLanguageModel.from_pretrained(options.output / "adapter", max_seq_length=128)
    if answer(model, tokenizer, held_out) != texts:
        raise SystemExit("the reloaded adapter writes other text than the trained model")
    print("adapter reloaded: identical text")
    model, tokenizer = FastLanguageModel.from_pretrained(
        options.output / "merged", max_seq_length=128, load_in_16bit=True
    )
    merged = exact_match(answer(model, tokenizer, held_out), held_out)
    print(f"merged model reloaded: exact match {merged:.1f} %")
    if abs(merged - after) > 2 and not options.smoke:
        raise SystemExit("the merged model's exact match differs by more than two points")
    print(f"saved in {options.output}: adapter, merged, loss.png")


if __name__ == "__main__":
    main()
