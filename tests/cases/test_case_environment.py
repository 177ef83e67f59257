"""Where it runs: no GPU, no bitsandbytes, no network, odd paths, clean working directories."""

import os
import shutil
import subprocess
import sys

import pytest
from tiny_models import build, close, ids, load, logits, ref, workdir


def python(code, cwd=None, **env):
    e = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", **env)
    r = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd or workdir("cwd"), env=e, capture_output=True, text=True, timeout=300
    )
    return r.returncode, r.stdout, r.stderr[-3000:]


LOAD = """
import torch
from fastlm import FastLanguageModel
model, tok = FastLanguageModel.from_pretrained(model_name={path!r}, max_seq_length=64, load_in_4bit={four}, dtype=torch.float32)
model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8, lora_dropout=0,
                                         bias="none", use_gradient_checkpointing=False, random_state=1)
x = torch.arange(8, 20)[None].to(next(model.parameters()).device)
model(input_ids=x, labels=x).loss.backward()
print("done")
"""


def test_import_without_a_gpu():
    code, out, err = python(
        "import fastlm; from fastlm import FastLanguageModel; "
        "from fastlm.chat_templates import get_chat_template, train_on_responses_only; print('ok')",
        CUDA_VISIBLE_DEVICES="",
    )
    assert code == 0 and "ok" in out, err


def test_training_step_without_bitsandbytes():
    block = "import sys; sys.modules['bitsandbytes'] = None\n"
    code, out, err = python(block + LOAD.format(path=build("llama"), four=False), CUDA_VISIBLE_DEVICES="")
    assert code == 0 and "done" in out, err


def test_4bit_without_bitsandbytes_says_so():
    block = "import sys; sys.modules['bitsandbytes'] = None\n"
    code, _out, err = python(block + LOAD.format(path=build("llama"), four=True), CUDA_VISIBLE_DEVICES="")
    assert code != 0 and "bitsandbytes" in err


def test_nothing_is_written_to_the_working_directory():
    """A read-only or shared working directory must do: no caches, no generated sources there."""
    cwd = workdir("cwd")
    code, _out, err = python(LOAD.format(path=build("llama"), four=False), cwd=cwd)
    assert code == 0, err
    assert os.listdir(cwd) == []


def test_no_connection_is_opened_for_a_local_directory():
    """Not even an attempt, whether or not the offline switches are set."""
    guard = """
import socket
def no(self, address, *a):
    if self.family != getattr(socket, "AF_UNIX", None): raise OSError(f"TRIED TO CONNECT {address}")
socket.socket.connect = no
socket.socket.connect_ex = no
real = socket.getaddrinfo
def lookup(host, *a, **k):
    print("LOOKED UP", host, flush=True); raise OSError("no name service")
socket.getaddrinfo = lookup
import os
for k in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"): os.environ.pop(k, None)
"""
    code, out, err = python(guard + LOAD.format(path=build("llama"), four=False))
    assert code == 0, err
    assert "LOOKED UP" not in out and "TRIED TO CONNECT" not in err


@pytest.mark.parametrize("name", ["with a space", "ümläut-模型", "a.b[c]{d}+e", "trailing/"])
def test_odd_directory_names(name):
    path = build("llama")
    here = os.path.join(workdir("odd"), name.rstrip("/"))
    shutil.copytree(path, here)
    batch = dict(input_ids=ids(1, 9))
    model, _ = load(here + ("/" if name.endswith("/") else ""))
    close(logits(model, batch), ref("forward", path=path, batch=batch))


def test_relative_directory_that_looks_like_a_hub_name():
    """./org/model exists here: it is used, and nothing else is asked for."""
    path = build("llama")
    cwd = workdir("cwd")
    shutil.copytree(path, os.path.join(cwd, "org", "model"))
    code, out, err = python(LOAD.format(path="org/model", four=False), cwd=cwd)
    assert code == 0 and "done" in out, err


def test_missing_directory_is_named_in_the_error():
    with pytest.raises(Exception) as e:
        load("/no/such/place/model")
    assert "/no/such/place/model" in str(e.value)
