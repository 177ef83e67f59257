# %% [markdown]
# # Continued pre-training
# Teach a model the words of a field from its documents: long texts in chunks that lose no token, new tokens, and perplexity on a text
# that it has not seen.

# %%
from fastlm import FastLanguageModel, add_new_tokens
from fastlm.data import load, preview
from fastlm.evaluation import held_out

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STEPS = 60

# %% [markdown]
# ## Documents
# Use `load("folder", …)` for files of text. Here a few are made up.

# %%
PARTS = ["the keel", "the rudder", "the mainsail", "the anchor", "the capstan", "the bilge"]
ACTS = ["is inspected before each voyage", "was repaired in the yard", "holds in heavy weather", "must be kept dry"]


def document(seed: int) -> str:
    notes = (f"Entry {n}: {PARTS[(seed + n) % 6]} {ACTS[(seed * n) % 4]}." for n in range(40))
    return f"<log> Ship {seed}\n" + "\n".join(notes) + "\n</log>"


documents = [{"text": document(seed)} for seed in range(24)]

# %% [markdown]
# ## New tokens
# They begin as the mean of all tokens. `get_peft_model` trains their rows, and no others, in the embedding and the head.

# %%
model, tokenizer = FastLanguageModel.from_pretrained(MODEL, max_seq_length=1024, load_in_16bit=True)
add_new_tokens(model, tokenizer, ["<log>", "</log>"])
model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=32)

# %% [markdown]
# ## Chunks
# Each chunk repeats the last 32 tokens of the one before as context; each token is trained once.

# %%
data = load(documents, tokenizer=tokenizer, chunk_length=256, overlap=32)
unseen = load([{"text": document(99)}], tokenizer=tokenizer, chunk_length=256, overlap=32)
print(preview(data, tokenizer, rows=1))
before = held_out(model, unseen)

# %%
settings = dict(
    output_dir="continued_pretraining", max_steps=STEPS, per_device_train_batch_size=4, learning_rate=5e-4, report_to="none"
)  # fmt: skip
trainer = FastLanguageModel.get_trainer(model, data, settings, processing_class=tokenizer)
trainer.train()
after = held_out(model, unseen)
print(f"perplexity of an unseen text: {before.perplexity:.2f} before, {after.perplexity:.2f} after")

# %%
model.save_pretrained("continued_pretraining/adapter")
# the new tokens are the tokenizer's: save it with the adapter
tokenizer.save_pretrained("continued_pretraining/adapter")
