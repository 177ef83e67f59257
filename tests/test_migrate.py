"""Scripts written for Unsloth or older TRL: rewritten, run, and with equal numbers."""

import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoint
import pytest
import torch
import transformers
import trl
from chats import make_tokenizer, texts, tiny_model
from peft import LoraConfig, get_peft_model

import fastlm
from fastlm.keywords import current
from fastlm.migrate import migrate_files, migrate_notebook, migrate_script

OLD = '''\
"""Fine-tune."""
import os, unsloth
from unsloth import FastLanguageModel, is_bfloat16_supported, PatchDPOTrainer  # first of all
from unsloth.chat_templates import (
    get_chat_template,
    train_on_responses_only as only_answers,
)
import torch
from trl import SFTTrainer, DPOTrainer
from transformers import TrainingArguments

PatchDPOTrainer()
max_seq_length = 256  # é
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Llama-3.2-1B",
    max_seq_length=max_seq_length,
    load_in_4bit=False,
)
model = FastLanguageModel.get_peft_model(
    model,
    r=8,
    use_gradient_checkpointing="unsloth",  # for long rows
    random_state=3407,
)
tokenizer = get_chat_template(tokenizer, chat_template="chatml", map_eos_token=False, patch_saving=False)
chats = [[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fine"}]] * 4
from datasets import Dataset
dataset = Dataset.from_dict({"text": [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]})
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=dataset,
    dataset_text_field="text",
    max_seq_length=max_seq_length,
    dataset_num_proc=1,
    packing=False,
    args=TrainingArguments(
        per_device_train_batch_size=2,
        warmup_ratio=0.1,
        max_steps=2,
        evaluation_strategy="no",
        overwrite_output_dir=True,
        group_by_length=True,
        fp16=not is_bfloat16_supported(),
        bf16=is_bfloat16_supported(),
        output_dir="outputs",
        report_to="none",
    ),
)
trainer = only_answers(
    trainer,
    instruction_part="<|im_start|>user\\n",
    response_part="<|im_start|>assistant\\n",
)
unsloth.unsloth_train(trainer)
'''
NEW = '''\
"""Fine-tune."""
import os
import fastlm
from fastlm import FastLanguageModel, is_bfloat16_supported  # first of all
from fastlm.chat_templates import get_chat_template, train_on_responses_only as only_answers
import torch
from trl import DPOTrainer
from fastlm import SFTTrainer
from transformers import TrainingArguments

pass
max_seq_length = 256  # é
'''


def test_an_old_script():
    made = migrate_script(OLD)
    assert made.after.startswith(NEW)
    for line in (
        '    use_gradient_checkpointing="auto",  # for long rows\n',
        'get_chat_template(tokenizer, chat_template="chatml", map_eos_token=False, )',
        "    tokenizer=tokenizer,\n",
        '        warmup_steps=0.1,\n        max_steps=2,\n        eval_strategy="no",\n',
        "        train_sampling_strategy='group_by_length',\n        fp16=not",
        "fastlm.unsloth_train(trainer)\n",
    ):
        assert line in made.after
    assert made.notes == [] and made.kind == "older keywords"
    assert "unsloth" not in made.after.replace("unsloth/Llama", "").replace("unsloth_train", "")
    # what is done is done
    again = migrate_script(made.after)
    assert again.after == made.after and again.kind == "nothing"


def test_the_migrated_script_runs(tmp_path):
    model = checkpoint.save(tmp_path / "tiny chat model")
    script = migrate_script(OLD).after.replace('"unsloth/Llama-3.2-1B"', repr(str(model)))
    script = script.replace("report_to=", "use_cpu=True, report_to=") if not torch.cuda.is_available() else script
    (tmp_path / "script.py").write_text(script)
    code = f"exec(compile({script!r}, 'script.py', 'exec')); print('steps', trainer.state.global_step, type(trainer).__module__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=checkpoint_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-3:] == ["steps", "2", "fastlm.migrated"]


def checkpoint_environment():
    root = Path(fastlm.__file__).resolve().parent.parent
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")])}


def test_a_current_script_needs_one_import():
    text = "from unsloth import FastLanguageModel\nfrom trl import SFTTrainer, SFTConfig\nSFTTrainer(args=SFTConfig(max_length=8))\n"
    made = migrate_script(text)
    assert made.after == text.replace("unsloth", "fastlm") and made.kind == "imports"
    assert made.diff().splitlines()[2:] == [
        "@@ -1,3 +1,3 @@",
        "-from unsloth import FastLanguageModel",
        "+from fastlm import FastLanguageModel",
        " from trl import SFTTrainer, SFTConfig",
        " SFTTrainer(args=SFTConfig(max_length=8))",
    ]


def test_what_has_no_counterpart_is_named():
    text = (
        "import os\n"
        "os.environ['UNSLOTH_RETURN_LOGITS'] = '1'\n"
        "from unsloth import FastLanguageModel, FastVisionModel\n"
        "m, t = FastLanguageModel.from_pretrained('x', fast_inference=True, gpu_memory_utilization=0.6)\n"
        "m = FastLanguageModel.get_peft_model(m, qat_scheme='int4')\n"
        "m.save_pretrained_torchao('g', t)\n"
        "m.fast_generate(t)\n"
        "from unsloth_zoo.saving import x\n"
    )
    made = migrate_script(text)
    found = [(note.line, note.text.split(":")[0]) for note in made.notes]
    assert found == [
        (2, "the environment variable UNSLOTH_RETURN_LOGITS has no effect"),
        (3, "FastVisionModel has no counterpart"),
        (4, "fast_inference=True has no counterpart in from_pretrained"),
        (5, "qat_scheme='int4' has no counterpart in get_peft_model"),
        (6, "save_pretrained_torchao is not there"),
        (7, "fast_generate is not there"),
        (8, "x has no counterpart"),
    ]
    ast.parse(made.after)


def test_names_that_it_writes_exist():
    from fastlm.migrate import METHODS, MISSING, NAMES

    for name, module in NAMES.items():
        assert hasattr(__import__(module, fromlist=[name]), name)
    assert not {*MISSING, *METHODS} & set(NAMES)
    for name in METHODS:
        # a method that came since is no longer missing
        assert f"def {name}" not in "".join(path.read_text() for path in Path(fastlm.__file__).parent.rglob("*.py"))


def test_other_trainers_and_odd_layouts():
    text = (
        "if True:\n"
        "    from unsloth import FastModel, PatchDPOTrainer; PatchDPOTrainer()\n"
        "    t = DPOTrainer(model, tokenizer=tokenizer, args=DPOConfig(evaluation_strategy='no', save_safetensors=False))\n"
        "    s = SFTTrainer(model, args=SFTConfig(max_seq_length=8), é='ü', tokenizer = tok)\n"
    )
    made = migrate_script(text)
    assert made.after == (
        "if True:\n"
        "    from fastlm import FastModel; pass\n"
        "    t = DPOTrainer(model, processing_class=tokenizer, args=DPOConfig(eval_strategy='no', ))\n"
        "    s = SFTTrainer(model, args=SFTConfig(max_seq_length=8), é='ü', tokenizer = tok)\n"
    )
    assert [note.text for note in made.notes] == ["save_safetensors=False is gone from DPOConfig"]
    broken = migrate_script("from unsloth import (\n")
    assert broken.after == broken.before and "no Python" in broken.notes[0].text


CELLS = [
    '%%capture\nimport os\nif "COLAB" in os.environ:\n    !pip install unsloth \\\n        trl\nelse:\n    !pip install --no-deps peft',
    "from unsloth import FastLanguageModel\nFastLanguageModel.from_pretrained?",
    "from trl import SFTTrainer\n!nvidia-smi",
    "trainer = SFTTrainer(model=model, tokenizer=tokenizer)",
    "print('nothing')",
]


def notebook(cells, as_lines):
    sources = [cell.splitlines(keepends=True) if as_lines else cell for cell in cells]
    code = [{"cell_type": "code", "source": source, "outputs": [], "metadata": {}} for source in sources]
    text = {"cell_type": "markdown", "source": ["unsloth is é"]}
    return {"cells": [text, *code], "metadata": {"x": 1}, "nbformat": 4}


@pytest.mark.parametrize("as_lines", [True, False])
def test_notebooks(as_lines):
    before = notebook(CELLS, as_lines)
    made = migrate_notebook(json.dumps(before, indent=1, ensure_ascii=False) + "\n")
    expected = notebook(
        [
            '%%capture\nimport os\nif "COLAB" in os.environ:\n    pass  # fastlm instead of: !pip install unsloth trl\n'
            "else:\n    !pip install --no-deps peft",
            "from fastlm import FastLanguageModel\nFastLanguageModel.from_pretrained?",
            "from fastlm import SFTTrainer\n!nvidia-smi",
            *CELLS[3:],
        ],
        as_lines,
    )
    assert json.loads(made.after) == expected
    assert made.after == json.dumps(expected, indent=1, ensure_ascii=False) + "\n"
    assert made.kind == "older keywords"
    assert [note.text for note in made.notes] == [
        "code cell 1: installs unsloth: install fastlm instead (README, Install)"
    ]
    with pytest.raises(ValueError, match="no notebook"):
        migrate_notebook("{}")


def test_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a.py").write_text("from unsloth import FastModel\n")
    (tmp_path / "sub/b.ipynb").write_text(json.dumps(notebook(CELLS, True)))
    (tmp_path / ".hidden/c.py").write_text("import unsloth\n")
    (tmp_path / "d.py").write_text("print()\n")
    assert [made.kind for made in migrate_files(tmp_path)] == ["imports", "older keywords"]
    with pytest.raises(ValueError, match="no file or folder"):
        list(migrate_files(tmp_path / "no"))
    (tmp_path / "e.txt").write_text("")
    with pytest.raises(ValueError, match="neither a script"):
        list(migrate_files(tmp_path / "e.txt"))


# --- trainers with the keywords of older releases ---

ROWS = ["hello there, how are you?", "one two three four", "the quick brown fox"] * 3
SETTINGS = dict(use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=3, seed=1)
SETTINGS |= dict(per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1)


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("make_args", [transformers.TrainingArguments, trl.SFTConfig, fastlm.SFTConfig])
def test_old_keywords_train_the_same(tmp_path, make_args):
    tokenizer, data = make_tokenizer(), texts(ROWS).rename_column("text", "body")
    settings = SETTINGS | dict(output_dir=str(tmp_path), gradient_checkpointing=False)
    given = make_args(**settings)
    old = fastlm.SFTTrainer(
        tiny_model(),
        given,
        train_dataset=data,
        tokenizer=tokenizer,
        dataset_text_field="body",
        max_seq_length=7,
        packing=False,
    )
    new = trl.SFTTrainer(
        model=tiny_model(),
        processing_class=tokenizer,
        train_dataset=data,
        args=trl.SFTConfig(**settings, dataset_text_field="body", max_length=7),
    )
    assert isinstance(old, trl.SFTTrainer) and old.args.max_length == 7 and old.args.learning_rate == 1e-2
    assert given is not old.args and not (isinstance(given, trl.SFTConfig) and given.max_length == 7)
    assert losses(old) == losses(new)


def test_settings_by_old_names(tmp_path):
    made = fastlm.SFTConfig(
        output_dir=str(tmp_path), max_seq_length=64, evaluation_strategy="no", warmup_ratio=0.1, no_cuda=True, bf16=False,
        group_by_length=True, overwrite_output_dir=True, save_safetensors=True, num_of_sequences=1024,
    )  # fmt: skip
    plain = trl.SFTConfig(
        output_dir=str(tmp_path), max_length=64, eval_strategy="no", warmup_steps=0.1, use_cpu=True, bf16=False,
        train_sampling_strategy="group_by_length",
    )  # fmt: skip
    assert isinstance(made, trl.SFTConfig)
    assert made.to_dict() == plain.to_dict()
    with pytest.raises(ValueError, match="max_seq_length=8 is max_length by its old name, which is given too: 9"):
        fastlm.SFTConfig(max_seq_length=8, max_length=9)
    with pytest.raises(TypeError, match="nonsense"):
        fastlm.SFTConfig(nonsense=1)
    # a number of steps wins over a share of them
    assert current({"warmup_ratio": 0.1, "warmup_steps": 5})[0] == {"warmup_steps": 5}
    assert current({"warmup_steps": 0, "warmup_ratio": 0.1})[0] == {"warmup_steps": 0.1}
    assert current({"adafactor": True, "save_safetensors": False}) == (
        {"optim": "adafactor"},
        ["adafactor=True is optim='adafactor'", "save_safetensors=False is gone: weights are saved as safetensors"],
    )
    with pytest.raises(ValueError, match="tokenizer is processing_class by its old name"):
        fastlm.SFTTrainer(tiny_model(), tokenizer=1, processing_class=2)


def test_todays_names_exist_in_trl():
    from fastlm import keywords

    names = {field.name for field in dataclasses.fields(trl.SFTConfig)}
    assert {*keywords.RENAMED.values(), *(new for new, _ in keywords.SWITCHES.values())} <= names
    assert not names & {*keywords.RENAMED, *keywords.GONE, *keywords.SWITCHES}


def unsloth_trainer(tmp_path, **rates):
    torch.manual_seed(0)
    model = get_peft_model(
        tiny_model(), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    )
    args = fastlm.UnslothTrainingArguments(output_dir=str(tmp_path), **SETTINGS | dict(weight_decay=0.1), **rates)
    return fastlm.UnslothTrainer(model=model, tokenizer=make_tokenizer(), train_dataset=texts(ROWS), args=args)


def test_learning_rates_of_their_own(tmp_path):
    trainer = unsloth_trainer(tmp_path, embedding_learning_rate=1e-4, loraplus_lr_ratio=16)
    optimizer = trainer.create_optimizer()
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    found = {
        names[id(p)]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    assert set(found) == {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    rates = {"lora_A": 1e-2, "lora_B": 16e-2, "embed_tokens": 1e-4, "lm_head": 1e-4}
    for name, (rate, decay) in found.items():
        assert rate == rates[next(part for part in rates if part in name)] and decay == 0.1
    assert type(optimizer) is type(unsloth_trainer(tmp_path).create_optimizer())
    # the scheduler scales all of them
    trainer.create_scheduler(num_training_steps=4)
    trainer.lr_scheduler.step()
    assert sorted(group["lr"] for group in optimizer.param_groups) == pytest.approx([0.75e-4, 0.75e-2, 12e-2])


def test_the_same_rate_for_all_is_the_plain_trainer(tmp_path):
    plain = unsloth_trainer(tmp_path)
    expected = losses(plain)
    same = unsloth_trainer(tmp_path, embedding_learning_rate=1e-2, loraplus_lr_ratio=1)
    assert fastlm.unsloth_train(same).global_step == 3
    assert [entry["loss"] for entry in same.state.log_history if "loss" in entry] == expected
    other = losses(unsloth_trainer(tmp_path, loraplus_lr_ratio=16))
    assert other[0] == expected[0] and other[1:] != expected[1:]


@pytest.mark.parametrize("value", [0, -1, "1e-4"])
def test_rates_that_are_none(tmp_path, value):
    with pytest.raises(ValueError, match=f"embedding_learning_rate must be a number above 0, or None, got {value!r}"):
        fastlm.UnslothTrainingArguments(output_dir=str(tmp_path), embedding_learning_rate=value)


def test_small_names():
    assert fastlm.FastModel is fastlm.FastLanguageModel
    assert (
        fastlm.is_bf16_supported()
        is fastlm.is_bfloat16_supported()
        is (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0))
    )
