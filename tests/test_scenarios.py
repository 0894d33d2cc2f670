"""What users ran into with memory and context, on the real experts of the default ensemble."""

import json
import subprocess
import sys

import numpy as np
import pytest

from gguf_fusion import hub
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import ContextOverflowError
from gguf_fusion.experts import weights
from gguf_fusion.experts.llama import LlamaExpert

pytestmark = pytest.mark.model

S, G, Q = "smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct"
OPTIONS = {"n_threads": 1, "lanes": "serial", "calibrate": False, "offline": True}


@pytest.mark.slow
def test_the_tightest_expert_decides():
    """Tokenizers count differently: the expert that is over its context is named, with its count; nothing is cut."""
    with Ensemble.from_registry("pocket", n_ctx=256, **OPTIONS) as ensemble:
        with pytest.raises(ContextOverflowError) as caught:
            ensemble.complete("\u4eca\u5929\u5929\u6c14\u5f88\u597d\u6211\u4eec\u53bb\u516c\u56ed" * 20, max_bytes=1)
        assert (caught.value.expert, caught.value.n_ctx) == (S, 256)
        assert caught.value.n_prompt > 400
        with pytest.raises(ContextOverflowError, match="shorten the prompt or raise the context"):
            ensemble.complete("filler word " * 400, max_bytes=1)
        assert ensemble.complete("still usable", max_bytes=4, seed=1).finish_reason == "length"


def test_the_end_of_the_context_is_a_clean_stop():
    """A limit of 128 tokens, padded to 256 natively, is kept: the text ends with "length" and the limit's tokens."""
    with Ensemble.from_files([S], n_ctx=128, **OPTIONS) as ensemble:
        done = ensemble.complete("The quick", temperature=0.0, max_bytes=10_000, logit_bias={0: -100.0, 2: -100.0})
        assert done.finish_reason == "length"
        assert done.usage.prompt_tokens[S] + done.usage.generated_tokens == 128


def test_prompts_of_the_contexts_length():
    """One token must stay free: n - 1 tokens are read, n are too many."""
    with LlamaExpert.load(hub.locate(S), n_ctx=64, n_threads=1) as expert:
        one = expert.tokenize(b" word")
        assert len(one) == 1
    with Ensemble.from_files([S], n_ctx=64, **OPTIONS) as ensemble:
        assert ensemble.complete(" word" * 62, max_tokens=1).usage.prompt_tokens[S] == 62
        assert ensemble.complete(" word" * 63, max_tokens=1).usage.prompt_tokens[S] == 63
        with pytest.raises(ContextOverflowError):
            ensemble.complete(" word" * 64, max_tokens=1)


@pytest.mark.slow
def test_large_vocabularies_do_not_eat_the_memory():
    """Gemma with a context of 8,192 and 1,000 tokens read: weights, cache and 200 MiB, in a process of its own."""
    code = """
import json, numpy as np, psutil
from gguf_fusion import hub
from gguf_fusion.experts import native
from gguf_fusion.experts.llama import LlamaExpert
native.start()
path, me = hub.locate("gemma-3-270m"), psutil.Process()
before = me.memory_info().rss
with LlamaExpert.load(path, n_ctx=8192, n_threads=1) as expert:
    ids = np.resize(expert.tokenize(b"The river was low that summer. " * 20), 1000).astype(np.int32)
    expert.evaluate(ids, 8)
    print(json.dumps([me.memory_info().rss - before, path.stat().st_size]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    grown, size = json.loads(done.stdout)
    assert grown < size + 8192 * 18_432 + (200 << 20)


def test_one_file_in_two_ensembles_is_loaded_once():
    """Two ensembles with one expert in common hold one copy of its weights and write the same text as alone."""
    before = weights.in_use()
    with Ensemble.from_files([S], n_ctx=256, **OPTIONS) as one:
        text = one.complete("The quick", temperature=0.0, max_tokens=6).text
        held = weights.in_use()
        with Ensemble.from_files([S], n_ctx=512, **OPTIONS) as two:
            assert weights.in_use() == held == before + 1
            one.complete("Another text", seed=2, max_tokens=3)
            assert two.complete("The quick", temperature=0.0, max_tokens=6).text == text
        assert one.complete("The quick", temperature=0.0, max_tokens=6).text == text
    assert weights.in_use() == before


def test_turns_cost_their_own_tokens():
    """The second turn of a conversation evaluates the new tail, and its law is that of a fresh run within rounding."""
    with Ensemble.from_files([S], n_ctx=512, **OPTIONS) as ensemble:
        expert = ensemble.experts[0]
        text = "One two three four five six seven eight nine ten. " * 5
        ensemble.complete("warm", max_tokens=1)
        list(ensemble.generate(text, max_tokens=2, temperature=0.0, reuse=True))
        before = expert.n_decoded
        longer = text + "And then"
        again = next(iter(ensemble.generate(longer, max_tokens=1, temperature=0.0, reuse=True, n_top=5)))
        assert expert.n_decoded - before < 10
        fresh = next(iter(ensemble.generate(longer, max_tokens=1, temperature=0.0, n_top=5)))
        assert again.symbol == fresh.symbol
        np.testing.assert_allclose(again.logprob, fresh.logprob, atol=0.3)
