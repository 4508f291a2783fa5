"""A change to a model of another tokenizer, on real engines: while both serve, each is asked in its
own ids and answers in its own words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models

from baton.client import AsyncClient
from baton.events import Finished, Routed, Tokens
from tests.engine.checkpoints import VOCAB
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import eventually
from tests.k8s.test_checkpoint_rollout import (
    ENGINE,
    MODELS,
    NUM_TOKENS,
    OVER_WITHIN_S,
    REQUEST_S,
    Asked,
    Asking,
    Changing,
    asking,
    claim_of,
    model_in,
    models,
    prompt_of,
)
from tests.k8s.test_serving import Installed
from tests.path.oracles import greedy_tokens
from tests.path.whole_path import Answer

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("crds", "kuberay"),
]

__all__ = ["models"]  # a fixture


def id_of(word: int, model: str) -> int:
    """The second model has its words the other way round."""
    return word if model == "first" else VOCAB - 1 - word


@pytest.fixture
def tokenizers(kubelet: Kubelet, models: None) -> None:
    words = {f"w{word}": id_of(word, "second") for word in range(VOCAB)}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = kubelet.claim(claim_of("second")) / "model" / "tokenizer.json"
    tokenizer.save(str(path))
    path.chmod(0o644)


class AskingInWords(Asking):
    async def _answer(
        self, client: AsyncClient, prompt: list[int], streams: asyncio.Event
    ) -> Answer:
        answer = Answer()
        async for event in client.generate(
            " ".join(f"w{word}" for word in prompt),
            temperature=0.0,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            timeout_s=REQUEST_S,
        ):
            match event:
                case Routed():
                    answer.routed.append(event)
                case Tokens():
                    streams.set()
                    answer.ids += event.ids
                    answer.text += event.text
                case Finished():
                    answer.finished = event
        assert answer.finished is not None
        return answer


def assert_as_alone(asked: Asked, model: str) -> None:
    family, overrides = MODELS[model]
    prompt = [id_of(word, model) for word in prompt_of(asked.number)]
    said = greedy_tokens(family, overrides, prompt, NUM_TOKENS)
    assert asked.answer.ids == said, asked
    assert asked.answer.text.split() == [f"w{id_of(token_id, model)}" for token_id in said]


def test_no_model_gets_the_other_s_ids_while_one_takes_over(
    control_plane: ControlPlane, namespace: str, kubelet: Kubelet, tokenizers: None, tmp_path: Path
) -> None:
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model=model_in("first"),
        servedModelName="both",
        engine=ENGINE,
        rollout={"weights": [50, 100], "step": "20s", "maxItlFactor": 100},
        router={"replicas": 1, "settings": {"localPrefill": "never"}},
    )
    installed.wait_available()
    with asking(AskingInWords(kubelet)) as requests:
        changing = Changing(installed, control_plane, kubelet, requests)
        eventually(lambda: changing.status() and changing.models, "the first one is told of")
        assert changing.answers_now() == {"first"}
        changing.change_to("second")
        both = {"first", "second"}
        eventually(lambda: changing.answers_now() == both, "both answer", OVER_WITHIN_S)
        eventually(lambda: changing.serves("Serving", "second"), "it is over", OVER_WITHIN_S)
        assert changing.answers_now() == {"second"}
    for asked in requests.answered:
        assert_as_alone(asked, changing.models[asked.cohort])
    print(f"{len(requests.answered)} requests")
