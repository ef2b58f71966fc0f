"""Turns of a chat, and the KV caches kept between them."""

import contextlib
import sys

import pytest

from afm_mlx.adapters.mask_predictor import MaskPredictor, PredictorConfig, small_model
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.prompt_masks import PromptMasks
from afm_mlx.cli.chat.dialogue import Dialogue
from afm_mlx.engine.generation import stream_generate
from afm_mlx.errors import ContextLengthError
from afm_mlx.loading.load import load
from afm_mlx.model.model import Model


@pytest.fixture
def start(folder):
    """Begin a conversation with the tiny model."""
    model, tokenizer = load(folder)

    def start(max_size=256, system_prompt=None, sliding=False):
        return Talk(model, tokenizer, max_size, system_prompt, sliding)

    return start


class Talk:
    """A conversation, and the same question to the model alone."""

    def __init__(self, model, tokenizer, max_size, system_prompt, sliding):
        self.model, self.tokenizer = model, tokenizer
        self.limits = {"max_kv_size": max_size, "sliding_window": True} if sliding else {}
        self.conversation = Dialogue(
            model,
            tokenizer,
            lambda: model.make_cache(max_size=max_size, sliding_window=sliding),
            system_prompt,
        )

    def ask(self, question, max_tokens=10, show=None):
        """The answer, and how many tokens of the prompt were computed."""
        shown = []
        options = {"max_tokens": max_tokens, **self.limits}
        last = self.conversation.ask(question, show or shown.append, **options)
        return "".join(shown), last and last.prompt_tokens

    def scratch(self, question, max_tokens=10):
        asked = [*self.conversation.messages, {"role": "user", "content": question}]
        prompt = self.tokenizer.apply_chat_template(asked, add_generation_prompt=True)
        options = {"max_tokens": max_tokens, **self.limits}
        responses = stream_generate(self.model, self.tokenizer, prompt, **options)
        return "".join(response.text for response in responses), len(prompt)


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("system_prompt", [None, "Be brief."])
def test_a_cached_conversation_is_the_one_from_scratch(start, rng, system_prompt, sliding):
    talk = start(48 if sliding else 256, system_prompt, sliding)
    # Answers that end by themselves, and answers that are cut.
    talk.tokenizer.eos_token_ids.update(range(0, 1000, 9))
    for turn in range(5):
        question = " ".join(rng.choice("the quick brown fox can be lazy".split(), 4))
        (expected, whole), (answer, computed) = talk.scratch(question), talk.ask(question)
        if not sliding:
            assert answer == expected
        if turn and not sliding:
            # Of what came before, no more is computed again than the last answer's tokenization.
            assert computed < whole - 10
    talk.conversation.reset()
    assert talk.scratch("the fox") == talk.ask("the fox")


def test_the_first_question_chooses_the_mask(folder, tmp_path):
    model, tokenizer = load(folder)
    args = model.args
    config = PredictorConfig(args.num_layers, args.ffn_dim, args.ffn_dim // 2, group=2)
    predictor = MaskPredictor(Model(small_model(args)), config, seed=1)
    pool = AdapterPool(model)
    masks = PromptMasks(pool, predictor.eval(), tokenizer)
    dialogue = Dialogue(model, tokenizer, model.make_cache, None, pool, masks=masks)
    answers = []
    for question in ("say x", "and y?"):
        answers.append(dialogue.ask(question, lambda text: None, max_tokens=3))
    assert all(answers)
    (name,) = pool.registered
    assert pool.load(name).mask is not None
    dialogue.reset()
    dialogue.ask("say something else", lambda text: None, max_tokens=3)
    first = [{"role": "user", "content": "say something else"}]
    prompt = tokenizer.apply_chat_template(first, add_generation_prompt=True)
    assert masks.name_for(prompt) in pool.registered


def test_an_interrupted_answer_stays_in_the_conversation(start):
    talk, shown = start(), []

    def show(text):
        shown.append(text)
        if len(shown) == 4:
            raise KeyboardInterrupt

    assert talk.ask("the fox", show=show)[1] is None
    said = {"role": "assistant", "content": "".join(shown)}
    assert talk.conversation.messages[-1] == said
    assert talk.scratch("and then")[0] == talk.ask("and then")[0]


def test_a_full_context_leaves_the_conversation_as_it_was(start):
    talk = start(160)
    talk.ask("the fox")
    before = talk.conversation.messages
    for question, limit in (("the fox " * 90, 10), ("the dog", -1)):
        with pytest.raises(ContextLengthError):
            talk.ask(question, limit)
        assert talk.conversation.messages == before
    assert talk.scratch("hm", 3)[0] == talk.ask("hm", 3)[0]


@pytest.mark.parametrize("seed", range(3))
def test_ctrl_c_anywhere_leaves_a_conversation_that_goes_on(start, rng, seed):
    """At any line of Python that runs for an answer: while the prompt is written, computed, or answered."""
    talk = start()
    talk.ask("the quick brown fox")
    before = talk.conversation.turns
    countdown = int(rng.spawn(seed + 1)[-1].integers(1, 25_000))  # an answer takes some 26,000

    def interrupt(frame, event, argument):
        nonlocal countdown
        countdown -= 1
        if not countdown:
            raise KeyboardInterrupt
        return interrupt

    tracer = sys.gettrace()
    sys.settrace(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        talk.ask("the lazy")
    sys.settrace(tracer)
    turns = talk.conversation.turns
    assert turns[:2] == before
    assert [turn["role"] for turn in turns[2:]] in ([], ["user", "assistant"])
    assert talk.scratch("and then")[0] == talk.ask("and then")[0]
