"""The calls that mlx-lm's users know, over this engine; and this model under mlx-lm's own loops.

Each test that names a letter is a regression test of a defect that mlx-lm 0.32.2 has on this architecture.
"""

import inspect

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.perplexity import eval_ppl
from mlx_lm.utils import quantize_model

import afm_mlx
from afm_mlx.engine.generation import batch_generate, generate, stream_generate
from afm_mlx.errors import AFMError, ContextLengthError, RequestError
from tests.afm_mlx.engine.test_engine import naive_greedy
from tests.tools.models import WordTokenizer, mlx_lm_twin, random_config, random_model
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

VOCAB = 48


@pytest.fixture
def model(rng):
    sizes = {"num_layers": 4, "num_kv_reuse_layers": 2, "vocab_size": VOCAB, "kv_bits": None}
    # A whole factor, since mlx-lm cuts a fraction of the feed-forward width off.
    return random_model(random_config(rng, hidden_dim_scale_factor=3.0, **sizes), rng)


@pytest.fixture
def tokenizer():
    tokenizer = WordTokenizer(VOCAB)
    tokenizer.eos_token_ids = set()
    return tokenizer


def words(tokens):
    return "".join(f"w{token} " for token in tokens)


# -- our functions


def test_signatures_are_mlx_lms():
    ours = inspect.signature(stream_generate).parameters
    theirs = inspect.signature(mlx_lm.stream_generate).parameters
    shared = [name for name in theirs if name not in ("kwargs", "stream")]
    assert list(ours)[: len(shared)] == shared
    assert (
        list(inspect.signature(generate).parameters)[:4]
        == list(inspect.signature(mlx_lm.generate).parameters)[:4]
    )
    theirs = list(inspect.signature(mlx_lm.load).parameters)
    assert list(inspect.signature(afm_mlx.load).parameters) == [
        *theirs,
        "activation_bits",
        "force_adapter",
    ]
    fields = set(mlx_lm.generate.__globals__["GenerationResponse"].__dataclass_fields__)
    assert set(afm_mlx.engine.generation.GenerationResponse.__dataclass_fields__) == fields


def test_stream_generate_yields_mlx_lms_responses(rng, model, tokenizer):
    prompt = rng.integers(0, VOCAB, 7).tolist()
    wanted = naive_greedy(model, prompt, 5)
    for form in (prompt, mx.array(prompt), words(prompt)):
        responses = list(stream_generate(model, tokenizer, form, max_tokens=5))
        assert [r.token for r in responses] == wanted
    assert "".join(r.text for r in responses) == words(wanted)
    assert [r.finish_reason for r in responses] == [None] * 4 + ["length"]
    assert [r.generation_tokens for r in responses] == [1, 2, 3, 4, 5]
    last = responses[-1]
    assert last.prompt_tokens == 7
    assert min(last.prompt_tps, last.generation_tps, last.peak_memory) > 0
    assert last.logprobs.shape == (VOCAB,)
    assert generate(model, tokenizer, prompt, max_tokens=5) == words(wanted)


def test_verbose_generate_ends_with_the_three_lines(rng, model, tokenizer, capsys):
    generate(model, tokenizer, [1, 2, 3], verbose=True, max_tokens=4)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[-3:]] == ["Prompt", "Generation", "Peak memory"]
    assert lines[-3].startswith("Prompt: 3 tokens, ")
    assert lines[-2].endswith(" tokens-per-sec")


def test_batch_generate_equals_single_runs(rng, model, tokenizer):
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in (3, 14, 1, 8)]
    limits = [4, 9, 6, 1]
    answer = batch_generate(model, tokenizer, prompts, limits, max_batch=3)
    for i, prompt in enumerate(prompts):
        wanted = naive_greedy(model, prompt, limits[i])
        assert answer.token_ids[i] == wanted
        assert answer.texts[i] == words(wanted)
    assert answer.finish_reasons == ["length"] * 4


def test_kv_bits_are_honoured_or_refused(rng, tokenizer):
    """(d) `--kv-bits` fails in mlx-lm's reuse layers."""
    sizes = {"hidden_dim": 128, "num_heads": 2, "num_kv_heads": 1, "num_layers": 3}
    config = random_config(rng, vocab_size=VOCAB, num_kv_reuse_layers=1, **sizes)
    model = random_model(config, rng)
    texts = {
        bits: generate(model, tokenizer, [1, 2], kv_bits=bits, max_tokens=3) for bits in (8, 16)
    }
    assert all(texts.values())
    for bits in (2, 4):
        with pytest.raises(RequestError, match=rf"kv_bits is {bits}.* 8 .*16"):
            generate(model, tokenizer, [1, 2], kv_bits=bits, max_tokens=3)
    with pytest.raises(AttributeError):
        mlx_lm.generate(
            mlx_lm_twin(model), _Wrapped(tokenizer), [1, 2], kv_bits=8, quantized_kv_start=0
        )


def test_max_kv_size_bounds_the_run(rng, model, tokenizer):
    """(e) `--max-kv-size` is ignored by mlx-lm for this architecture."""
    prompt = rng.integers(0, VOCAB, 6).tolist()
    seen = []
    with pytest.raises(ContextLengthError, match="context of 9 tokens is full"):
        for response in stream_generate(model, tokenizer, prompt, 50, max_kv_size=9):
            seen.append(response.token)
    assert seen == naive_greedy(model, prompt, 4)
    text = generate(model, tokenizer, prompt, max_tokens=50, max_kv_size=9, sliding_window=True)
    assert len(text.split()) == 50
    # What it looks like where the bound is ignored:
    cache = make_prompt_cache(mlx_lm_twin(_with_scales(model, rng)), max_kv_size=9)
    assert not hasattr(cache[0], "max_size")


def test_prompt_cache_is_updated_in_place(rng, model, tokenizer):
    prompt = rng.integers(0, VOCAB, 6).tolist()
    cache = model.make_cache(max_size=model.args.context_length)
    first = [r.token for r in stream_generate(model, tokenizer, prompt, 3, prompt_cache=cache)]
    assert cache[0].lengths == [6 + 2]
    more = [r.token for r in stream_generate(model, tokenizer, first[-1:], 3, prompt_cache=cache)]
    assert first + more == naive_greedy(model, prompt, 6)


def test_progress_of_the_prompt_is_reported(rng, model, tokenizer):
    calls = []
    generate(
        model,
        tokenizer,
        [1] * 10,
        max_tokens=1,
        prefill_step_size=4,
        prompt_progress_callback=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(4, 10), (8, 10), (9, 10)]


def test_what_cannot_be_honoured_is_refused(model, tokenizer):
    with pytest.raises(RequestError, match="draft_model"):
        generate(model, tokenizer, [1], draft_model=model)
    with pytest.raises(TypeError):
        generate(model, tokenizer, [1], no_such_option=1)
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        batch_generate(model, tokenizer, [[1]], [1, 2])


# -- our model under mlx-lm's own code


class _Wrapped(WordTokenizer):
    """What mlx-lm's loops ask of a tokenizer, words again."""

    eos_token_id = None
    chat_template = None

    def __init__(self, tokenizer):
        super().__init__(tokenizer.vocab_size)
        self.eos_token_ids = set()

    def apply_chat_template(self, messages, **options):
        raise NotImplementedError

    def get_vocab(self):
        return {f"w{i}": i for i in range(self.vocab_size)}

    def encode(self, text, add_special_tokens=False):
        return [1] if "," in text else super().encode(text)


def _with_scales(model, rng):
    from dataclasses import replace

    return random_model(replace(model.args, kv_bits=8), rng)


def test_mlx_lm_stream_generate_accepts_the_model(rng, model, tokenizer):
    prompt = rng.integers(0, VOCAB, 9).tolist()
    responses = list(
        mlx_lm.stream_generate(model, _Wrapped(tokenizer), prompt, 6, prefill_step_size=4)
    )
    assert [r.token for r in responses] == naive_greedy(model, prompt, 6)


def test_mlx_lm_batches_of_unequal_prompts_are_right(rng, model, tokenizer):
    """(f) mlx-lm rotates reuse queries of every row at the longest row's position."""
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in (3, 12, 7)]

    def answers(any_model):
        answer = mlx_lm.batch_generate(
            any_model, _Wrapped(tokenizer), prompts, max_tokens=8, return_token_ids=True
        )
        return answer.token_ids

    assert answers(model) == [naive_greedy(model, prompt, 8) for prompt in prompts]


def test_ragged_logits_where_mlx_lm_is_wrong(rng):
    """(f) again, in logits: the same batch through mlx-lm's model is off, through ours it is not."""
    sizes = {"hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "rope_theta": 100.0}
    config = random_config(rng, num_layers=4, num_kv_reuse_layers=3, vocab_size=VOCAB, **sizes)
    model = random_model(config, rng)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (4, 11)]
    wanted = [np.array(model(mx.array([p]))[0, -1]) for p in prompts]

    def batched(any_model):
        caches = []
        for prompt in prompts:
            cache = make_prompt_cache(any_model)
            any_model(mx.array([prompt[:-1]]), cache=cache)
            caches.append(cache)
        merged = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
        logits = any_model(mx.array([[p[-1]] for p in prompts]), cache=merged)
        return max(
            np.abs(np.array(logits[i, -1]) - w).max() / w.std() for i, w in enumerate(wanted)
        )

    error = batched(model)
    assert error < 5e-2  # a few int8 steps at most
    assert batched(mlx_lm_twin(model)) > 5 * max(error, 1e-2)


def test_mlx_lm_speculative_decoding_with_a_supplied_cache(rng, model):
    """(g) mlx-lm splits the cache at len(model.layers), more entries than its own model makes."""
    sizes = {"num_layers": 1, "num_kv_reuse_layers": 0, "vocab_size": VOCAB, "kv_bits": None}
    draft = random_model(random_config(rng, **sizes), rng)
    prompt = rng.integers(0, VOCAB, 6).tolist()

    def run(target):
        cache = make_prompt_cache(target) + make_prompt_cache(draft)
        steps = speculative_generate_step(
            mx.array(prompt), target, draft, max_tokens=6, prompt_cache=cache
        )
        return [int(token) for token, _, _ in steps]

    assert run(model) == naive_greedy(model, prompt, 6)
    with pytest.raises(IndexError):
        run(mlx_lm_twin(_with_scales(model, rng)))


def test_mlx_lm_perplexity_and_deep_copies_accept_the_model(rng, model):
    data = mx.array(rng.integers(0, VOCAB, (4, 16)))
    perplexity, _ = eval_ppl(model, data, batch_size=2)
    logits = np.array(model(data[:, :-1]), dtype=np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(logits, np.array(data[:, 1:])[..., None], -1).mean()
    assert perplexity == pytest.approx(np.exp(nll), rel=1e-4)


def test_quantized_by_mlx_lm_and_run(rng, tokenizer):
    """(a) mlx-lm can't quantize its own afm7: FusedLinear.to_quantized() takes no mode."""
    sizes = {"hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "hidden_dim_scale_factor": 2.0}
    config = random_config(rng, vocab_size=VOCAB, num_layers=3, num_kv_reuse_layers=1, **sizes)
    model = random_model(config, rng)
    with pytest.raises(TypeError, match="to_quantized"):
        quantize_model(mlx_lm_twin(model), {}, 32, 8, mode="affine")
    whole = np.array(model(mx.array([[1, 2, 3, 4]])))
    quantized, values = quantize_model(model, {}, 32, 8, mode="affine")
    assert values["quantization"]["bits"] == 8
    got = np.array(quantized(mx.array([[1, 2, 3, 4]])))
    assert np.abs(got - whole).max() / whole.std() < 0.2
    assert generate(quantized, tokenizer, [1, 2], max_tokens=3)


# -- mlx-lm's zoo through our engine


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_zoo_models_run_in_the_engine(rng, tokenizer, model_type):
    model = zoo_model(model_type, VOCAB, int(rng.integers(2**31)))
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in (2, 9, 5)]
    for prompt in prompts:
        wanted = naive_greedy(model, prompt, 6)
        got = [r.token for r in stream_generate(model, tokenizer, prompt, 6, prefill_step_size=3)]
        assert got == wanted
        steps = generate_step(mx.array(prompt), model, max_tokens=6)
        assert [int(token) for token, _ in steps] == wanted
    answer = batch_generate(model, tokenizer, prompts, 6, max_batch=2)
    assert answer.token_ids == [naive_greedy(model, prompt, 6) for prompt in prompts]


def test_load_runs_zoo_folders(rng, tmp_path):
    for model_type in ["llama", "qwen3"]:
        model = zoo_model(model_type, VOCAB, 3)
        write_zoo_folder(tmp_path / model_type, model_type, model, word_tokenizer_json(VOCAB))
        loaded, tokenizer = afm_mlx.load(str(tmp_path / model_type))
        prompt = [5, 9, 2]
        text = generate(loaded, tokenizer, "w5 w9 w2", max_tokens=5)
        wanted = naive_greedy(model, prompt, 5, tokenizer.eos_token_ids)
        assert text.split() == [f"w{t}" for t in wanted if t not in tokenizer.eos_token_ids]


def test_numbers_and_configs_of_the_zoos_models_are_looked_at_too(tmp_path):
    model = zoo_model("llama", 40, 3)
    norm = model.model.norm.weight
    norm[3] = float("nan")
    write_zoo_folder(tmp_path / "zoo", "llama", model, word_tokenizer_json(40))
    with pytest.raises(AFMError, match=r"zoo: model.norm.weight holds NaN or infinity"):
        afm_mlx.load(tmp_path / "zoo")
    for change in ({"num_attention_heads": "four"}, {"hidden_size": None}, {"model_type": "a.b"}):
        with pytest.raises(AFMError, match="mlx-lm can't load"):
            afm_mlx.load(tmp_path / "zoo", model_config=change)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {"a.lora_a": mx.array([[1]])})
    with pytest.raises(AFMError, match=r"a\.lora_a is int32; an adapter's tensors are float16"):
        afm_mlx.load(tmp_path / "zoo", adapter_path=str(adapter))
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {"a.lora_b": norm})
    with pytest.raises(AFMError, match=r"adapters\.safetensors: a\.lora_b holds NaN"):
        afm_mlx.load(tmp_path / "zoo", adapter_path=str(adapter))


def test_load_refuses_what_is_no_model(tmp_path):
    with pytest.raises(AFMError, match="no folder"):
        afm_mlx.load(str(tmp_path / "missing"))
    (tmp_path / "base-model.pt").write_bytes(b"x")
    with pytest.raises(AFMError, match="afm-mlx convert"):
        afm_mlx.load(str(tmp_path / "base-model.pt"))
    with pytest.raises(AFMError, match=r"config\.json is missing"):
        afm_mlx.load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(AFMError, match="mlx-lm can't load"):
        afm_mlx.load(str(tmp_path))
