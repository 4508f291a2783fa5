"""Greedy tokens and how likely each is are those of transformers, and the comparison would notice
a lost block."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import pytest
import torch
import transformers

from baton.config.engine import EngineConfig
from engine.api import LocalDeviceMemory, LocalSink
from engine.request import SamplingParams
from engine.run.build import load_lone_engine, load_model_spec
from engine.run.torch_engine import TorchModel
from engine.run.torch_runner import load_torch_decoder
from tests.engine import checkpoints, families
from tests.engine.driving import Driver, Setup, generate, random_prompt, set_up
from tests.engine.fakes import pool_is_whole
from tests.engine.greedy import Greedy, run_alone

FAMILIES = list(families.FAMILIES)
NUM_TOKENS = 12
# Of heads that the C++ attention serves; torch's serves the others', with a compiler or without.
NATIVE = ("mistral", "qwen3", "gemma3")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @lru_cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        checkpoints.save(family, path)
        return path

    return folder


@lru_cache
def oracle(family: str) -> transformers.PreTrainedModel:
    return checkpoints.oracle_model(family)


@lru_cache
def oracle_answer(family: str, length: int, shared: int = 0) -> Greedy:
    prompt = prompt_of(length, shared)
    return checkpoints.greedy_answer(oracle(family), prompt, NUM_TOKENS)


def prompt_of(length: int, shared: int = 0) -> list[int]:
    """Its first `shared` tokens (64 at most) are those of every such prompt."""
    common = random_prompt(64, families.VOCAB, 5)[:shared]
    return common + random_prompt(length - shared, families.VOCAB, length)


def check(folder: Path, family: str, lengths: list[int], chunk: int, block_size: int) -> None:
    config = EngineConfig(
        dtype="float32", num_blocks=4096 // block_size, block_size=block_size, num_threads=1
    )
    prompts = [prompt_of(length) for length in lengths]
    found = generate(Driver(set_up(folder, config)), prompts, NUM_TOKENS, chunk)
    assert found == [oracle_answer(family, length) for length in lengths]


@pytest.mark.parametrize(
    ("family", "chunk", "block_size", "lengths"),
    [
        ("llama", 16, 16, [1, 2, 15, 333]),
        ("llama-tied-linear", 64, 32, [16, 17, 200]),
        ("mistral", 512, 8, [39, 40, 41, 700]),
        ("qwen2", 64, 16, [1, 23, 24, 25, 400]),
        ("qwen3", 512, 16, [63, 64, 65, 1500]),
        ("mixtral", 16, 32, [5, 31, 129]),
        ("qwen3-moe", 64, 8, [1, 47, 300]),
        ("gemma3", 64, 8, [1, 23, 24, 25, 400]),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    folders: Callable[[str], Path], family: str, chunk: int, block_size: int, lengths: list[int]
) -> None:
    check(folders(family), family, lengths, chunk, block_size)


@pytest.mark.full
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_in_every_combination(
    folders: Callable[[str], Path], family: str, chunk: int, block_size: int
) -> None:
    for lengths in ([1], [2, 3, 15, 16, 17], [63, 64, 65, 500], [1500]):
        check(folders(family), family, lengths, chunk, block_size)


def check_whole_engine(folder: Path, family: str) -> None:
    path = str(folder)
    config = EngineConfig(
        dtype="float32",
        num_blocks=64,
        max_num_seqs=3,
        max_num_batched_tokens=48,
        device="cpu",
        num_threads=1,
    )
    engine = load_lone_engine(path, config)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    lengths = [(length, length // 2) for length in (1, 16, 33, 70, 129)]
    found = run_alone(engine, [prompt_of(*length) for length in lengths], greedy)
    assert [*map(Greedy.of, found)] == [oracle_answer(family, *length) for length in lengths]
    pool_is_whole(engine)


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe", "qwen3-windows", *NATIVE])
def test_a_whole_engine_with_its_kv_in_a_tensor_gives_the_tokens_of_transformers(
    folders: Callable[[str], Path], family: str
) -> None:
    check_whole_engine(folders(family), family)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in NATIVE else pytest.mark.full)
        for family in FAMILIES
    ],
)
def test_a_whole_engine_without_a_compiler_gives_the_tokens_of_transformers(
    folders: Callable[[str], Path], family: str
) -> None:
    check_whole_engine(folders(family), family)


def test_a_kv_pool_on_another_device_than_the_model_is_refused(
    folders: Callable[[str], Path],
) -> None:
    path = str(folders("qwen3"))
    config = EngineConfig(dtype="float32", num_blocks=8, num_threads=1)
    model = load_model_spec(path, config)
    loaded = TorchModel(model, config, load_torch_decoder(path, config, model, None))
    memory = LocalDeviceMemory(model.region_layout(config, 0, 1), config.num_regions, "meta")
    with pytest.raises(TypeError, match="lies on meta"):
        loaded.make_engine(memory, LocalSink())


# --- the oracle has power: one change of the KV between prefill and decode changes the answer -----
#
# As many tokens of as long a prompt as anywhere in smallest blocks, of which one matters least. By
# the tokens alone, without how likely they are, a third to two thirds of these harms go unseen.
#
# Attention does not see the order of its keys, as their positions are rotated into them: two of a
# request's own blocks, swapped whole, are no error. Swaps are with what belongs elsewhere.

LENGTH = 1504  # whole blocks: the narrowest window still sees the last one whole
BLOCK_SIZE = 8


class Harm:
    """Ways to damage the KV of sequence 0; sequence 1 is a bystander of the same length."""

    def __init__(self, setup: Setup, driver: Driver) -> None:
        self.layout = setup.spec.layout
        self._kv = setup.runner._kv.layers
        self._tables = driver.tables

    def all(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for group in range(len(self.layout.groups)):
            for ordinal in self.visible(group):
                for harm in (self.zero, self.repeat_neighbour, self.exchange, self.shift_keys):
                    name = f"{harm.__name__} block {ordinal} of group {group}"
                    yield name, partial(harm, group, ordinal)
        for layer in range(self.layout.num_layers()):
            yield f"swap heads of layer {layer}", partial(self.swap_heads, layer)
            yield f"swap layer {layer} and the next", partial(self.swap_layers, layer)
            for ordinal in self.visible(self._group_of(layer)):
                yield (
                    f"zero block {ordinal} of layer {layer} alone",
                    partial(self.zero_in_layer, layer, ordinal),
                )
            for heads in (slice(None), *range(self._kv[layer].keys.shape[2])):
                name = f"heads {heads} of layer {layer}"
                yield f"zero {name}", partial(self.zero_heads, layer, heads)
                yield f"shift {name}", partial(self.shift_heads, layer, heads)

    def _group_of(self, layer: int) -> int:
        return next(
            number
            for number, group in enumerate(self.layout.groups)
            if group.first_layer <= layer < group.first_layer + group.num_layers
        )

    def visible(self, group: int) -> range:
        """Full blocks that the next token still sees whole."""
        spec, size = self.layout.groups[group], self.layout.block_size
        first = 0 if spec.window is None else max(0, LENGTH + 1 - spec.window)
        return range(-(-first // size), LENGTH // size)

    def _tensors(self, group: int) -> Iterator[torch.Tensor]:
        spec = self.layout.groups[group]
        for layer in self._kv[spec.first_layer : spec.first_layer + spec.num_layers]:
            yield layer.keys.flatten(0, 1)
            yield layer.values.flatten(0, 1)

    def _block(self, seq: int, group: int, ordinal: int) -> int:
        return int(self._tables[seq][group][ordinal])

    def zero(self, group: int, ordinal: int) -> None:
        block = self._block(0, group, ordinal)
        for tensor in self._tensors(group):
            tensor[block] = 0

    def repeat_neighbour(self, group: int, ordinal: int) -> None:
        """An off-by-one in a block table."""
        block, other = self._block(0, group, ordinal), self._block(0, group, ordinal - 1)
        for tensor in self._tensors(group):
            tensor[block] = tensor[other]

    def exchange(self, group: int, ordinal: int) -> None:
        """Another request's block at the same position."""
        block, other = self._block(0, group, ordinal), self._block(1, group, ordinal)
        for tensor in self._tensors(group):
            tensor[[block, other]] = tensor[[other, block]]

    def shift_keys(self, group: int, ordinal: int) -> None:
        """Keys one slot beside their values."""
        block = self._block(0, group, ordinal)
        for tensor in islice(self._tensors(group), 0, None, 2):
            tensor[block] = tensor[block].roll(1, dims=1)

    def zero_heads(self, layer: int, heads: int | slice) -> None:
        for tensor in (self._kv[layer].keys, self._kv[layer].values):
            tensor[:, :, heads] = 0

    def shift_heads(self, layer: int, heads: int | slice) -> None:
        """Keys one slot beside their values, in every block."""
        keys = self._kv[layer].keys[:, :, heads]
        self._kv[layer].keys[:, :, heads] = keys.roll(1, dims=1)

    def zero_in_layer(self, layer: int, ordinal: int) -> None:
        """One push of a block that was lost."""
        block = self._block(0, self._group_of(layer), ordinal)
        for tensor in (self._kv[layer].keys, self._kv[layer].values):
            tensor.flatten(0, 1)[block] = 0

    def swap_layers(self, layer: int) -> None:
        """Blocks that were pushed to another layer."""
        pair = (layer, (layer + 1) % self.layout.num_layers())
        groups = [self._group_of(member) for member in pair]
        for ordinal in set(self.visible(groups[0])) & set(self.visible(groups[1])):
            blocks = [self._block(0, group, ordinal) for group in groups]
            for kind in ("keys", "values"):
                one, other = (getattr(self._kv[member], kind).flatten(0, 1) for member in pair)
                one[blocks[0]], other[blocks[1]] = other[blocks[1]].clone(), one[blocks[0]].clone()

    def swap_heads(self, layer: int) -> None:
        for tensor in (self._kv[layer].keys, self._kv[layer].values):
            tensor[:, :, [0, 1]] = tensor[:, :, [1, 0]]


def sampled(
    harms: Iterator[tuple[str, Callable[[], None]]], count: int | None
) -> list[tuple[str, Callable[[], None]]]:
    """All harms to heads and layers, and `count` of those of one kind to one group's or layer's
    single blocks; None: all of these too."""
    kinds: dict[str, list[tuple[str, Callable[[], None]]]] = {}
    for name, harm in harms:
        kinds.setdefault(re.sub(r"block \d+", "block", name), []).append((name, harm))
    draw = random.Random(7)
    return [
        harm
        for kind in kinds.values()
        for harm in (kind if count is None else draw.sample(kind, min(count, len(kind))))
    ]


@pytest.mark.parametrize(
    ("family", "num_harms"),
    [
        ("qwen2", 3),
        ("qwen3", 3),
        *(pytest.param(family, None, marks=pytest.mark.full) for family in FAMILIES),
    ],
)
def test_any_one_harm_to_the_kv_changes_the_answer(
    folders: Callable[[str], Path], family: str, num_harms: int | None
) -> None:
    """Of those to single blocks `num_harms` of each kind, taken at random; None is all."""
    config = EngineConfig(
        dtype="float32", num_blocks=400, block_size=BLOCK_SIZE, num_regions=1, num_threads=1
    )
    setup = set_up(folders(family), config)
    driver = Driver(setup)
    for seq in range(2):
        driver.add(seq, random_prompt(LENGTH, families.VOCAB, LENGTH + seq), NUM_TOKENS)
        driver.step({seq: LENGTH})
    first, first_logprob = driver.tokens[0][LENGTH], driver.logprobs[0][0]
    prompt = driver.tokens[0][:LENGTH]
    prefilled = setup.memory.buffer.copy()
    expected = checkpoints.greedy_answer(oracle(family), prompt, NUM_TOKENS)

    def is_seen(harm: Callable[[], None]) -> bool:
        """Decode after `harm`, until the answer differs."""
        setup.memory.buffer[:] = prefilled
        driver.tokens[0], driver.logprobs[0] = [*prompt, first], [first_logprob]
        driver.computed[0] = LENGTH
        harm()
        for count in range(1, NUM_TOKENS + 1):
            if driver.answer(0) != Greedy(expected.ids[:count], expected.logprobs[:count]):
                return True
            if count < NUM_TOKENS:
                driver.step({0: 1})
        return False

    assert not is_seen(lambda: None)
    harms = Harm(setup, driver)
    assert all(harms.visible(group) for group in range(len(harms.layout.groups)))
    chosen = sampled(harms.all(), num_harms)
    assert not [name for name, harm in chosen if not is_seen(harm)]
