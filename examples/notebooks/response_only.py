# %% [markdown]
# # Training on answers only
# A model should learn to answer, not to ask. Which tokens are answers, the chat template itself tells: no marker strings.

# %%
from fastlm import FastLanguageModel
from fastlm.chat_templates import get_chat_template, train_on_responses_only
from fastlm.data import batch_by_tokens, load, preview

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STEPS = 40

# %% [markdown]
# ## Conversations of several turns
# Each answer is trained with the token that ends it; questions, system texts and what tools return are not.

# %%
rows = [
    {
        "messages": [
            {"role": "system", "content": "You do sums."},
            {"role": "user", "content": f"What is {n} + {n}?"},
            {"role": "assistant", "content": f"It is {2 * n}."},
            {"role": "user", "content": "And one more?"},
            {"role": "assistant", "content": f"Then it is {2 * n + 1}."},
        ]
    }
    for n in range(200)
]
model, tokenizer = FastLanguageModel.from_pretrained(MODEL, max_seq_length=512, load_in_4bit=True)
# a template of ours, or the model's own: leave this line out
tokenizer = get_chat_template(tokenizer, "chatml")
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)

# %%
settings = dict(
    output_dir="response_only", max_steps=STEPS, per_device_train_batch_size=1, max_length=None, learning_rate=1e-3,
    report_to="none",
)  # fmt: skip
trainer = FastLanguageModel.get_trainer(model, load(rows), settings, processing_class=tokenizer)
train_on_responses_only(trainer)
print(preview(trainer, rows=1))

# %% [markdown]
# `train_on_responses_only(trainer, last_response_only=True)` would train the last answer alone, and
# `instruction_part=…, response_part=…` looks for marker texts where there is no conversation.
#
# ## Batches without padding
# As many whole conversations as fit into 1,024 tokens, side by side in one row; none sees another.

# %%
batch_by_tokens(trainer, 1024)
print(len(trainer.train_dataset), "batches of", len(rows), "conversations")

# %%
trainer.train()
model.save_pretrained("response_only/adapter")
tokenizer.save_pretrained("response_only/adapter")
