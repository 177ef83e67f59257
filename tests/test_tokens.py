"""New tokens: as the mean of all, in tokenizer, embedding and head; trained with the adapter as plain PEFT does, saved and loaded."""

import json

import pytest
import tiny
import torch
import training
import transformers
from peft import LoraConfig, get_peft_model

import fastlm

NEW = ["<scratch>", "</scratch>", "Überwachungsgerät"]
IDS = [160, 161, 162]
SHAPE = dict(intermediate_size=128)


def checkpoint(folder, **over):
    tiny.model("llama", **SHAPE, **over).save_pretrained(folder)
    training.tokenizer().save_pretrained(folder)
    return str(folder)


def load(path, **mode):
    return fastlm.FastLanguageModel.from_pretrained(
        path, dtype=torch.float32, strict=True, **(mode or dict(load_in_16bit=True))
    )


def tables(model):
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


@pytest.mark.parametrize("spare", [0, 40], ids=["grows", "spare-rows"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
def test_rows_begin_as_the_mean(tmp_path, tied, spare):
    model, tokenizer = load(checkpoint(tmp_path, tie_word_embeddings=tied, vocab_size=160 + spare))
    before = [table.detach().clone() for table in tables(model)]
    assert fastlm.add_new_tokens(model, tokenizer, ["t007", *NEW]) == [7, *IDS]
    now = tables(model)
    assert (now[0] is now[1]) == tied
    assert now[0].shape[0] == now[1].shape[0] == model.config.vocab_size == (200 if spare else 192)
    for table, old in zip(now, before, strict=True):
        assert not table.requires_grad
        assert torch.equal(table[:160], old[:160])
        # spare rows are no tokens: they do not count
        torch.testing.assert_close(table[IDS].double(), old[:160].double().mean(0).expand(3, -1), rtol=1e-6, atol=1e-7)
    assert tokenizer("t009 <scratch> t010 Überwachungsgerät")["input_ids"] == [9, 160, 10, 162]
    assert tokenizer.decode([9, 160, 161]) == "t009 <scratch> </scratch>"
    # all there: nothing happens
    assert fastlm.add_new_tokens(model, tokenizer, NEW) == IDS and tables(model)[0] is now[0]


def test_a_revert_keeps_the_rows(tmp_path):
    path = checkpoint(tmp_path)
    model, tokenizer = load(path)
    fastlm.add_new_tokens(model, tokenizer, NEW)
    stock = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    stock.resize_token_embeddings(192, mean_resizing=False)
    stock.load_state_dict(model.state_dict())
    x = tiny.ids(2, 9)
    x[:, 2:4] = 161
    fastlm.revert(model)
    assert model.config.vocab_size == 192
    assert torch.equal(model.eval()(input_ids=x).logits, stock.eval()(input_ids=x).logits)


def stock_like(model, path, mode, tied):
    """Plain transformers and PEFT with the same weights, new rows and adapter."""
    if "load_in_4bit" in mode:
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )  # fmt: skip
        mode = dict(quantization_config=quantization)
    else:
        mode = {}
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **mode
    )
    if mode:
        fastlm.quant.keep_cpu_layout(stock)
    stock.resize_token_embeddings(192, mean_resizing=False)
    rows = IDS if tied else {"embed_tokens": IDS, "lm_head": IDS}
    config = LoraConfig(
        target_modules=tiny.LINEAR, r=4, lora_alpha=12, trainable_token_indices=rows, task_type="CAUSAL_LM"
    )
    stock = get_peft_model(stock, config)
    copies = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if parameter.requires_grad or "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(copies[name])
    return stock


@pytest.mark.parametrize("mode", [dict(load_in_16bit=True), dict(load_in_4bit=True)], ids=["16bit", "4bit"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
def test_trained_with_an_adapter_as_plain_peft_does(tmp_path, tied, mode):
    path = checkpoint(tmp_path / "base", tie_word_embeddings=tied)
    model, tokenizer = load(path, **mode)
    fastlm.add_new_tokens(model, tokenizer, NEW)
    model = fastlm.FastLanguageModel.get_peft_model(model, r=4, lora_alpha=12)
    with torch.no_grad():
        # the untrained adapter does nothing, and the new rows are all the same
        for n, (_, parameter) in enumerate(sorted(model.named_parameters())):
            if parameter.requires_grad:
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n)) * 0.1,
                )
    rows = {n: p for n, p in model.named_parameters() if "trainable_tokens_delta" in n}
    assert len(rows) == (1 if tied else 2) and all(p.shape == (3, 64) and p.requires_grad for p in rows.values())
    stock = stock_like(model, path, mode, tied)
    for batch in (tiny.padded_batch(), tiny.packed_batch()):
        batch["input_ids"][:, 2:5] = batch["labels"][:, 2:5] = torch.tensor(IDS)
        want_loss, want = tiny.loss_and_gradients(stock, batch, use_cache=False)
        loss, got = tiny.loss_and_gradients(model, batch, use_cache=False)
        assert abs(loss - want_loss) <= 1e-5 * want_loss and set(got) == set(want)
        assert all(tiny.relative(got[n], want[n]) <= 1e-5 for n in want)
    # through TRL's trainer, which asks for the fused head; its own cannot read such a model's, so stock runs in transformers'
    # trainer. Over 4-bit weights TRL rounds what it trains to bfloat16, which transformers does not
    ours = training.plain if "load_in_4bit" in mode else training.sft
    data = training.rows().map(lambda row: {"input_ids": [*IDS, *row["input_ids"]], "labels": [*IDS, *row["labels"]]})
    runs = [training.train(make(each, tmp_path, data)) for each, make in ((model, ours), (stock, training.plain))]
    training.assert_same_run(*([{n: entry[n] for n in ("loss", "grad_norm")} for entry in run] for run in runs))
    training.assert_same_weights(training.trained(model), training.trained(stock))
    training.train(training.sft(model, tmp_path, data))
    training.assert_ran_fast(model)
    for parameter in model.parameters():
        # as PEFT will load it
        if parameter.requires_grad:
            parameter.data = parameter.data.float()

    folder = tmp_path / "adapter"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    x = tiny.ids(2, 12)
    x[:, 3:6] = torch.tensor(IDS)
    wanted = model.eval()(input_ids=x).logits
    loaded, its_tokenizer = load(str(folder), **mode)
    assert its_tokenizer.convert_tokens_to_ids(NEW) == IDS
    assert tiny.relative(loaded.eval()(input_ids=x).logits, wanted) <= 1e-5
    if tied:
        embedding, head = loaded.get_base_model().model.embed_tokens, loaded.get_base_model().lm_head
        assert (
            torch.equal(embedding.weight, head.weight)
            and embedding.original_module.weight is head.original_module.weight
        )
    model.save_pretrained_merged(tmp_path / "merged", tokenizer, dtype=torch.float32)
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is tied
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert tiny.relative(merged(input_ids=x).logits, wanted) <= 1e-5


def test_an_adapter_without_embeddings_brings_its_rows(tmp_path):
    """Where the base model's folder is not looked at, PEFT saves the trained rows alone."""
    path = checkpoint(tmp_path / "base")
    model, tokenizer = load(path)
    fastlm.add_new_tokens(model, tokenizer, NEW)
    model = fastlm.FastLanguageModel.get_peft_model(model, r=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(torch.randn(3, 64, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    x = tiny.ids(2, 12)
    x[:, 3:6] = torch.tensor(IDS)
    wanted = model.eval()(input_ids=x).logits
    loaded, _ = load(str(tmp_path / "adapter"))
    # the other rows that were added are no tokens
    assert tiny.relative(loaded.eval()(input_ids=x).logits[..., :163], wanted[..., :163]) <= 1e-5
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    config["trainable_token_indices"] = {"embed_tokens": [10**9]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trains row 1000000000 of an embedding of 160"):
        load(str(tmp_path / "adapter"))


def test_what_an_adapter_trains_whole_gets_no_rows_apart(tmp_path):
    model, tokenizer = load(checkpoint(tmp_path))
    fastlm.add_new_tokens(model, tokenizer, NEW)
    model = fastlm.FastLanguageModel.get_peft_model(model, r=4, modules_to_save=["embed_tokens", "lm_head"])
    assert not [n for n, _ in model.named_parameters() if "trainable_tokens" in n]
    loss, gradients = tiny.loss_and_gradients(model, tiny.padded_batch())
    assert {n.split(".")[-4] for n in gradients if "modules_to_save" in n} == {"embed_tokens", "lm_head"}


def test_full_fine_tuning_trains_the_rows(tmp_path):
    model, tokenizer = load(checkpoint(tmp_path), full_finetuning=True)
    fastlm.add_new_tokens(model, tokenizer, NEW)
    batch = tiny.padded_batch()
    batch["input_ids"][:, 2:5] = torch.tensor(IDS)
    _, gradients = tiny.loss_and_gradients(model, batch)
    assert gradients["model.embed_tokens.weight"][IDS].abs().sum(-1).min() > 0


def test_wrong_arguments(tmp_path):
    path = checkpoint(tmp_path)
    model, tokenizer = load(path)
    cases = [
        (dict(new_tokens="<a>"), TypeError, "a list of texts, got '<a>'"),
        (dict(new_tokens=["<a>", 3]), TypeError, "a list of texts"),
        (dict(new_tokens=[]), ValueError, "none of them empty"),
        (dict(new_tokens=["<a>", " "]), ValueError, "none of them empty"),
        (dict(new_tokens=["<a>", "<a>"]), ValueError, "texts that differ"),
        (dict(tokenizer=None, new_tokens=["<a>"]), TypeError, "NoneType"),
        (dict(model=tiny.model("llama"), new_tokens=["<a>"]), ValueError, "fastlm.patch_model first"),
        (dict(model=fastlm.FastLanguageModel.get_peft_model(model), new_tokens=["<a>"]), ValueError, "before get_peft_model"),
    ]  # fmt: skip
    for given, error, words in cases:
        with pytest.raises(error, match=words):
            fastlm.add_new_tokens(**{"model": model, "tokenizer": tokenizer, **given})
    assert len(tokenizer) == 160
