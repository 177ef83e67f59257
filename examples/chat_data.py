"""From rows of any usual form to a model trained on its answers alone, with a look at what it will see.

    python examples/chat_data.py [--data train.jsonl] [--smoke]

Without --data a few rows of three forms stand in for a file. Try a broken row: it is dropped and explained.
"""

import argparse
import logging
from pathlib import Path

from smollm2 import smollm2

from fastlm import FastLanguageModel
from fastlm.chat_templates import train_on_responses_only
from fastlm.data import load, preview

ROWS = [
    {
        "instruction": "Name the capital of the country.",
        "input": country,
        "output": f"The capital of {country} is {capital}.",
    }
    for country, capital in (("France", "Paris"), ("Japan", "Tokyo"), ("Peru", "Lima"), ("Kenya", "Nairobi")) * 8
]
BROKEN = [{"instruction": "Name the capital.", "input": "Italy", "output": None}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file or folder that fastlm.data.load reads")
    parser.add_argument("--model", help="folder or hub id; by default SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, default=Path("build/chat_data"))
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    # load says what it found
    logging.basicConfig(format="%(message)s")
    logging.getLogger("fastlm").setLevel(logging.INFO)

    rows = load(options.data or ROWS + BROKEN)
    model, tokenizer = FastLanguageModel.from_pretrained(
        options.model or smollm2(), max_seq_length=512, load_in_4bit=True
    )
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
    # TRL's SFTTrainer, in the precision that suits the device
    settings = dict(
        output_dir=str(options.output), max_steps=2 if options.smoke else 40, learning_rate=1e-3, report_to="none"
    )
    trainer = FastLanguageModel.get_trainer(model, train_dataset=rows, processing_class=tokenizer, args=settings)
    # the answers, each with its end-of-turn token, and nothing else
    train_on_responses_only(trainer)
    print(preview(trainer, rows=2))
    trainer.train()
    model.save_pretrained(options.output / "adapter")
    tokenizer.save_pretrained(options.output / "adapter")


if __name__ == "__main__":
    main()
