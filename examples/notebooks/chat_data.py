# %% [markdown]
# # Chat data
# Rows of any usual form become conversations that a trainer reads. What cannot be trained on is dropped, counted and explained.

# %%
import logging

from fastlm import FastLanguageModel
from fastlm.chat_templates import train_on_responses_only
from fastlm.data import load, preview

logging.basicConfig(format="%(message)s")
# load says what it found
logging.getLogger("fastlm").setLevel(logging.INFO)

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STEPS = 40

# %% [markdown]
# ## One line for each form
# A file (`load("train.jsonl")`), a folder, a data set, a list or a pandas table: columns tell the form. Here are Alpaca's columns, with one
# row that has no answer.

# %%
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi"}
rows = [
    {"instruction": "Name the capital.", "input": country, "output": f"The capital of {country} is {capital}."}
    for country, capital in CAPITALS.items()
] * 8
data = load([*rows, {"instruction": "Name the capital.", "input": "Italy", "output": None}])
print(data.info.description)

# %% [markdown]
# ShareGPT's form gives the same columns:

# %%
turns = [{"from": "human", "value": "Name the capital of Chile."}, {"from": "gpt", "value": "Santiago."}]
print(load([{"conversations": turns}])[0])

# %% [markdown]
# ## What the model will see
# Trained tokens are green (⟦ ⟧ without colours). Nothing is trained yet: look first.

# %%
model, tokenizer = FastLanguageModel.from_pretrained(MODEL, max_seq_length=512, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
settings = dict(output_dir="chat_data", max_steps=STEPS, learning_rate=1e-3, report_to="none")
trainer = FastLanguageModel.get_trainer(model, data, settings, processing_class=tokenizer)
train_on_responses_only(trainer)
print(preview(trainer, rows=1))

# %%
trainer.train()
model.save_pretrained("chat_data/adapter")
tokenizer.save_pretrained("chat_data/adapter")
