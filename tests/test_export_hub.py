"""Uploads: what is uploaded is what would be saved, a connection that fails is tried again, and the token is nowhere."""

import importlib
import json
import logging
import pathlib
import types

import checkpoint
import pytest
import torch
from exported import same_bits, shake, tensors
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from fastlm import FastLanguageModel
from fastlm.export import hub

# httpx, or what later releases of the hub's client use
httpx = importlib.import_module(HTTPError.__module__.partition(".")[0])
TOKEN = "hf_" + "a1b2c3d4e5" * 3


class Hub:
    """Stands for huggingface_hub's client: fails as often as it is told, then keeps what is uploaded."""

    def __init__(self, failures=()):
        self.failures = list(failures)
        self.calls, self.kept, self.tokens = [], {}, []

    def __call__(self, token=None):
        self.tokens.append(token)
        return self

    def _answer(self, name, settings):
        self.calls.append((name, settings))
        if self.failures:
            failure = self.failures.pop(0)
            if failure is not None:
                raise failure

    def create_repo(self, repo_id, **settings):
        self._answer("create", settings)
        return types.SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def upload_folder(self, repo_id, folder_path, **settings):
        self._answer("upload", settings | {"repo_id": repo_id})
        for path in pathlib.Path(folder_path).rglob("*"):
            if path.is_file():
                self.kept[path.relative_to(folder_path).as_posix()] = path.read_bytes()
        return types.SimpleNamespace(commit_url=f"https://hub.example/{repo_id}/commit/1")


def status(code):
    request = httpx.Request("POST", "https://hub.example/api", headers={"authorization": f"Bearer {TOKEN}"})
    return HfHubHTTPError(f"status {code}", response=httpx.Response(code, request=request))


@pytest.fixture
def waits(monkeypatch):
    found = []
    monkeypatch.setattr(hub.time, "sleep", found.append)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = checkpoint.save(tmp_path_factory.mktemp("hub") / "base")
    made, tokenizer = FastLanguageModel.from_pretrained(str(folder), load_in_16bit=True, lora_r=4)
    return shake(made), tokenizer


def on(monkeypatch, *failures):
    made = Hub(failures)
    monkeypatch.setattr(hub, "HfApi", made)
    return made


def test_what_is_uploaded_is_what_would_be_saved(model, monkeypatch, tmp_path, waits):
    made, (live, tokenizer) = on(monkeypatch), model
    url = live.push_to_hub_merged(
        "model", tokenizer, token=TOKEN, private=True, max_shard_size="40KB", commit_message="done"
    )
    assert url == "https://hub.example/me/model/commit/1" and made.tokens == [TOKEN]
    (_, create), (_, upload) = made.calls
    assert create == dict(private=True, exist_ok=True)
    assert upload["commit_message"] == "done" and upload["repo_id"] == "me/model"
    live.save_pretrained_merged(tmp_path / "out", tokenizer, max_shard_size="40KB")
    saved = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert made.kept == saved and len([name for name in saved if name.startswith("model-")]) > 2
    assert not waits


def test_an_adapter_is_uploaded(model, monkeypatch, tmp_path, waits):
    made, (live, tokenizer) = on(monkeypatch), model
    live.push_to_hub("someone/adapter", tokenizer, token=TOKEN)
    assert json.loads(made.kept["adapter_config.json"])["r"] == 4 and "tokenizer.json" in made.kept
    (tmp_path / "adapter_model.safetensors").write_bytes(made.kept["adapter_model.safetensors"])
    live.save_lora(tmp_path / "out")
    one, other = tensors(tmp_path), tensors(tmp_path / "out")
    assert set(one) == set(other) and all(same_bits(one[key], other[key]) for key in one)
    made = on(monkeypatch)
    live.push_to_hub_merged("someone/adapter", save_method="lora")
    assert "adapter_model.safetensors" in made.kept and "model.safetensors" not in made.kept


def test_failures_that_pass_are_tried_again(model, monkeypatch, waits, caplog):
    failures = [status(503), None, httpx.ConnectError("refused"), status(429), httpx.ReadTimeout("slow"), None]
    made, (live, _) = on(monkeypatch, *failures), model
    with caplog.at_level(logging.DEBUG):
        live.push_to_hub_merged("someone/model", token=TOKEN)
    assert [name for name, _ in made.calls] == ["create"] * 2 + ["upload"] * 4
    assert waits == [1, 1, 4, 15]
    assert "uploading to someone/model failed (ConnectError)" in caplog.text
    assert "model.safetensors" in made.kept


def test_failures_that_stay_are_errors(model, monkeypatch, waits):
    live, tokenizer = model
    made = on(monkeypatch, status(401))
    with pytest.raises(HfHubHTTPError):
        live.push_to_hub_merged("someone/model", tokenizer, token=TOKEN)
    # before anything was merged
    assert [name for name, _ in made.calls] == ["create"] and not waits
    made = on(monkeypatch, None, *[status(500)] * 5)
    with pytest.raises(HfHubHTTPError, match="status 500"):
        live.push_to_hub_merged("someone/model", tokenizer, token=TOKEN)
    assert waits == [1, 4, 15, 60] and len(made.calls) == 6
    made = on(monkeypatch)
    with pytest.raises(ValueError, match="repo_id|Repo id"):
        live.push_to_hub_merged("a/b/c", tokenizer, token=TOKEN)
    with pytest.raises(ValueError, match="save_method must be"):
        live.push_to_hub_merged("someone/model", save_method="merged16")
    with pytest.raises(TypeError, match="token_"):
        live.push_to_hub_merged("someone/model", token_="x")
    assert "model.safetensors" not in made.kept


def test_the_token_is_nowhere(model, monkeypatch, waits, caplog, capfd, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(hub.tempfile, "tempdir", str(tmp_path))
    live, tokenizer = model
    made = on(monkeypatch, None, httpx.ConnectError("refused"), *[status(502)] * 4)
    with caplog.at_level(logging.DEBUG), pytest.raises(HfHubHTTPError) as caught:
        live.push_to_hub_merged("someone/model", tokenizer, token=TOKEN)
    assert TOKEN not in str(caught.value) and TOKEN not in repr(caught.value)
    made = on(monkeypatch)
    with caplog.at_level(logging.DEBUG):
        live.push_to_hub_merged("someone/model", tokenizer, token=TOKEN)
        live.push_to_hub("someone/model", tokenizer, token=TOKEN)
    shown = capfd.readouterr()
    assert TOKEN not in caplog.text + shown.out + shown.err
    assert not any(TOKEN.encode() in content for content in made.kept.values())
    left = [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert not left and torch.is_tensor(next(live.parameters()))
