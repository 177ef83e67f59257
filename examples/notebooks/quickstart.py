# %% [markdown]
# # Quickstart
# Fine-tune a small model in 4 bit so that free text becomes strict JSON, look at what it writes before and after, and save it.
# Runs on a GPU in seconds and on a CPU in minutes.

# %%
from fastlm import FastLanguageModel, report
from fastlm.evaluation import exact_match, generate

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STEPS = 60

# %% [markdown]
# ## The task
# Rows of `prompt` and `completion`: only the completion is trained.

# %%
THINGS = [
    "chair",
    "lamp",
    "mug",
    "pillow",
    "table",
    "hammer",
    "blanket",
    "pencil",
    "bottle",
    "helmet",
    "basket",
    "mirror",
]
NAMES = ["Anna", "Bob", "David", "Frank", "James", "Maria", "Tom"]


def order(n: int) -> dict[str, str]:
    thing, name, count = THINGS[n % len(THINGS)], NAMES[n % len(NAMES)], 2 + n % 89
    answer = f' {{"item": "{thing}", "quantity": {count}, "customer": "{name}"}}'
    return {"prompt": f"Order: {name} would like {count} {thing}s.\nJSON:", "completion": answer}


train, held_out = [order(n) for n in range(960)], [order(n) for n in range(1000, 1020)]
print(train[0])

# %% [markdown]
# ## Model and adapter

# %%
model, tokenizer = FastLanguageModel.from_pretrained(MODEL, max_seq_length=256, load_in_4bit=True)


def judge() -> float:
    texts = generate(model, tokenizer, [row["prompt"] for row in held_out], max_new_tokens=40)
    print(texts[0])
    return sum(exact_match(text, row["completion"]) for text, row in zip(texts, held_out, strict=True)) / len(texts)


before = judge()
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)

# %% [markdown]
# ## Train
# The trainer is TRL's own `SFTTrainer`, in the precision that suits the device.

# %%
settings = dict(
    output_dir="quickstart", max_steps=STEPS, per_device_train_batch_size=16, learning_rate=1e-3, report_to="none"
)
trainer = FastLanguageModel.get_trainer(model, train, settings, processing_class=tokenizer)
trainer.train()
print(report(model))

# %%
after = judge()
print(f"exact match: {before:.0%} before, {after:.0%} after")

# %% [markdown]
# ## Save
# The adapter alone, or the merged model; both load again with `FastLanguageModel.from_pretrained`, or without fastlm.

# %%
model.save_pretrained("quickstart/adapter")
tokenizer.save_pretrained("quickstart/adapter")
model.save_pretrained_merged("quickstart/merged", tokenizer, save_method="merged_16bit")
