# %% [markdown]
# # Evaluation
# Held-out loss, perplexity and accuracy, and answers judged while the model trains. A run is the same to the bit with and without them.

# %%
from fastlm import FastLanguageModel
from fastlm.chat_templates import train_on_responses_only
from fastlm.data import load
from fastlm.evaluation import GenerationEvaluation, exact_match, generate, held_out, json_valid, pattern_equal

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STEPS = 60

# %%
rows = [
    {"question": f"What is {a} plus {b}?", "answer": f'{{"sum": {a + b}}}'} for a in range(2, 40) for b in range(2, 9)
]
train, test = load(rows[::2]), load(rows[1::23])
model, tokenizer = FastLanguageModel.from_pretrained(MODEL, max_seq_length=256, load_in_4bit=True)
print("before:", held_out(model, test, tokenizer))

# %% [markdown]
# ## During training
# `held_out` and `eval_loss` say how likely the right answers are; `GenerationEvaluation` lets the model write answers and scores them:
# the same text, valid JSON, the same number. Any function of a text and its reference is a score.

# %%
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
settings = dict(
    output_dir="evaluation", max_steps=STEPS, per_device_train_batch_size=16, learning_rate=1e-3, eval_strategy="steps",
    eval_steps=20, save_strategy="steps", save_steps=20, metric_for_best_model="exact", load_best_model_at_end=True,
    report_to="none",
)  # fmt: skip
trainer = FastLanguageModel.get_trainer(model, train, settings, eval_dataset=test, processing_class=tokenizer)
train_on_responses_only(trainer)
scores = {"exact": exact_match, "json": json_valid, "number": pattern_equal(r"-?\d+")}
trainer.add_callback(GenerationEvaluation(trainer, test, scores, max_new_tokens=24))
trainer.train()

# %%
for entry in trainer.state.log_history:
    if "eval_exact" in entry:
        print(f"step {entry['step']}:", {name: entry[f"eval_{name}"] for name in scores})

# %% [markdown]
# ## Afterwards

# %%
print("after:", held_out(model, test, tokenizer))
chat = [{"role": "user", "content": "What is 12 plus 7?"}]
print(generate(model, tokenizer, [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)]))

# %% [markdown]
# For the tasks of lm-eval (`pip install 'fastlm[eval]'`):
# `lm_eval.simple_evaluate(model=fastlm.evaluation.harness_model(model, tokenizer), tasks=["gsm8k"])`.
