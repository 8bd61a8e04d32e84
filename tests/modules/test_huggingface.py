"""Models of Hugging Face as their documentation calls them, under ZeRO-3 on two processes, beside the modules alone.

Each with its configuration's defaults but for sizes, so with a cache of keys where it has one, and with all hidden
states; with attentions and the routers' own loss where MORE says so: outputs, gradients, three updates, buffers;
recomputed or not by turns, and at night both. `make hf` does so with every architecture of the installed transformers.
"""

from __future__ import annotations

import copy
import pathlib
import traceback
import warnings
from typing import Any

import pytest
import torch
from nightly import NIGHTLY, todays
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks

transformers = pytest.importorskip("transformers")
import huggingface_compared as compared  # noqa: E402
import huggingface_inputs as inputs  # noqa: E402
import huggingface_tiny as tiny  # noqa: E402

F32, F64 = torch.float32, torch.float64
MODELS = {
    "LlamaForCausalLM": F64,
    "GPT2LMHeadModel": F64,  # its head is tied to its embedding
    "T5ForConditionalGeneration": F64,
    "BertForMaskedLM": F64,
    "AlbertForMaskedLM": F64,  # one unit for all its layers, whose first call collects more
    "ViTForImageClassification": F64,
    "Qwen2VLForConditionalGeneration": F64,  # two towers, of which one takes the patches of all images in a row
    "CLIPModel": F64,
    "MixtralForCausalLM": F32,  # its grouped products are not there in float64
    "Qwen2MoeForCausalLM": F32,
    "MambaForCausalLM": F64,
    "WhisperForConditionalGeneration": F64,
    "ResNetForImageClassification": F64,  # with buffers that its forward writes to
    "CTRLLMHeadModel": F64,  # its forward assigns a buffer anew
    "RecurrentGemmaForCausalLM": F64,  # keeps its last states, which no later copy can be made of
}
# held nightly and by `make hf`: what they have, others of these have, too
LATER = {
    *("BertForMaskedLM", "ViTForImageClassification", "CLIPModel", "Qwen2MoeForCausalLM"),
    "WhisperForConditionalGeneration",
}
# what more it is asked for, and by which settings
MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LlamaForCausalLM": ({"output_attentions": True}, {"_attn_implementation": "eager"}),
    "MixtralForCausalLM": ({"output_router_logits": True}, {"router_aux_loss_coef": 1.0}),
}
NEAR = {F64: 1e-10, F32: 1e-5}


def compare(rank: int, names: list[str]) -> dict[str, str]:
    """What is wrong with each; "" for nothing."""
    said: dict[str, str] = {}
    for place, name in enumerate(names):
        remats = (False, True) if NIGHTLY else (place % 2 == 0,)
        kind = getattr(transformers, name)
        config, (options, settings) = tiny.smaller(kind.config_class()), MORE.get(name, ({}, {}))
        for field, value in settings.items():
            setattr(config, field, value)
        module = tiny.built(kind, config, MODELS[name])
        batches = [{**batch, **options} for batch in inputs.batches_for(module, (1, 2))]
        try:
            found = compared.differences(module, batches, rank, remats=remats)
        except Exception:
            said[name] = traceback.format_exc()
            continue
        far = {what: value for what, value in found.items() if value[0] > NEAR[MODELS[name]]}
        said[name] = str(far) if far else ""
        if compared.writes(module, batches[0]):
            assert {"buffers, remat" if remat else "buffers" for remat in remats} <= found.keys()
    return said


def test_models_as_their_documentation_calls_them() -> None:
    names = todays([name for name in MODELS if NIGHTLY or name not in LATER], of=4)
    with fz.testing.hazards(0):
        for said in run_ranks(Named(names), 2, backend="processes", timeout=200):
            assert said == dict.fromkeys(names, "")


class Named:
    """A rank's work on some models, as processes take it."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __call__(self, rank: int) -> dict[str, str]:
        warnings.simplefilter("ignore")  # of transformers' own
        return compare(rank, self.names)


# ---- LoRA by peft


def adapted(base: str) -> nn.Module:
    """A model that peft has wrapped; its factors are not zero, so that all have gradients."""
    peft = pytest.importorskip("peft")
    kind = getattr(transformers, base)
    module = tiny.built(kind, tiny.smaller(kind.config_class()))
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return peft.get_peft_model(module, config).double().train()


def compare_adapted(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    module = adapted("LlamaForCausalLM")
    batches = inputs.batches_for(module.get_base_model(), (1, 2))  # type: ignore[operator]
    found = compared.differences(module, batches, rank)

    apply, params = fz.functional(module)
    step = fz.shard_zero3(fz.train_step(lambda params, batch: apply(params, **batch).loss, fz.adamw(1e-2)))
    state = step.init(params)
    loss, pullback = step.vjp(state, batches[rank])
    grads, _ = pullback(torch.ones_like(loss))
    full, state = fz.gather(grads), step.update(state, grads)[0]
    after, moments = fz.gather(state.params), fz.gather(state.moments.mu)
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    trained = [name for name, param in module.named_parameters() if param.requires_grad]
    return {
        "apart": max(far for far, _ in found.values()),
        "factors": len(trained),
        "trained": all(full[name].any() and not torch.equal(after[name], params[name]) for name in trained),
        "frozen": all(torch.equal(after[name], params[name]) for name in frozen),
        "nothing of the base": all(full[name] is None and moments[name] is None for name in frozen),
    }


def test_lora_by_peft_unchanged() -> None:
    pytest.importorskip("peft")
    for found in run_ranks(compare_adapted, 2, backend="processes", timeout=200):
        assert found.pop("apart") < 1e-10
        assert found.pop("factors") == 2 * 7 * 2
        assert found == {"trained": True, "frozen": True, "nothing of the base": True}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_model_of_peft_is_saved_as_others_read_it(tmp_path: pathlib.Path) -> None:
    """Its adapter, or merged; never a folder in names that `from_pretrained` does not know."""
    peft, base = pytest.importorskip("peft"), "LlamaForCausalLM"
    module: Any = adapted(base)
    (batch,) = inputs.batches_for(module.get_base_model(), (2,))
    apply, params = fz.functional(module)
    adapter, merged, file = tmp_path / "adapter", tmp_path / "merged", tmp_path / "state.safetensors"
    plain = tiny.built(getattr(transformers, base), module.config).double()
    own = module.get_base_model().state_dict()
    plain.load_state_dict({name.replace(".base_layer", ""): x for name, x in own.items()}, strict=False)

    def rank_main(rank: int) -> Any:
        step = fz.shard_zero3(fz.train_step(lambda params, batch: apply(params, **batch).loss, fz.adamw(1e-2)))
        state, _ = step(step.init(params), batch)
        with pytest.raises(ValueError, match=r"(?s)base_layer.*random weights.*save_pretrained.*merge_and_unload"):
            fz.save_safetensors(tmp_path, state)
        fz.save_safetensors(file, state)
        again = fz.load_safetensors(step, file, like=params)
        assert_trees_equal(fz.gather(again.params), fz.gather(state.params))
        names = [name for name, param in module.named_parameters() if param.requires_grad]
        factors, whole = fz.gather(state.params, "|".join(names), to=0), fz.gather(state.params, to=0)
        if rank == 0:
            module.load_state_dict(factors, strict=False)
            module.save_pretrained(adapter)
            module.load_state_dict(whole, strict=False)
            module.merge_and_unload().save_pretrained(merged)
        return whole

    trained = run_ranks(rank_main, 2)[0]
    read = [
        peft.PeftModel.from_pretrained(plain, adapter).eval(),
        transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float64).eval(),
    ]
    want = apply.eval(trained, **batch).logits
    assert not torch.allclose(want, apply.eval(params, **batch).logits, rtol=1e-3)
    for model in read:
        torch.testing.assert_close(model.double()(**batch).logits, want, rtol=1e-9, atol=1e-9)


KINDS = {
    "LoraConfig": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "IA3Config": {"target_modules": ["k_proj", "v_proj"], "feedforward_modules": []},
    "AdaptionPromptConfig": {"task_type": "CAUSAL_LM", "adapter_len": 2, "adapter_layers": 1},
    "PrefixTuningConfig": {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what peft takes from transformers
def test_adapters_of_other_kinds_are_saved_as_the_refusal_says(kind: str, tmp_path: pathlib.Path) -> None:
    peft, base = pytest.importorskip("peft"), transformers.LlamaForCausalLM
    plain: Any = tiny.built(base, tiny.smaller(base.config_class()))
    model = peft.get_peft_model(copy.deepcopy(plain), getattr(peft, kind)(**KINDS[kind]))
    tokens = torch.arange(6).view(2, 3)
    apply, params = fz.functional(model)
    step = fz.train_step(lambda p: apply(p, input_ids=tokens, labels=tokens).loss, fz.adamw(0.1))
    before = apply.eval(params, input_ids=tokens).logits
    state, _ = step(step.init(params))
    with pytest.raises(ValueError, match=r"model\.load_state_dict\(trained, strict=False\), before"):
        fz.save_safetensors(tmp_path, state)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    trained = fz.gather(state.params, "|".join(names), to=0)
    model.load_state_dict(trained, strict=False)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(plain, tmp_path).eval()
    want = apply.eval(fz.gather(state.params), input_ids=tokens).logits
    torch.testing.assert_close(again(tokens).logits, want, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(want, before, rtol=1e-3)


def test_a_prompt_encoder_that_is_not_of_peft_is_saved(tmp_path: pathlib.Path) -> None:
    params = {"prompt_encoder.mask_embed.conv1.bias": torch.ones(2)}  # as SamModel calls it
    state = fz.train_step(lambda p: p, fz.sgd(0.1)).init(params)
    fz.save_safetensors(tmp_path, state)
    assert (tmp_path / "model.safetensors").exists()
