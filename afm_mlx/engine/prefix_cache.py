"""Keys and values of prompts and answers, kept for later prompts that begin with the same tokens.

They are kept in blocks of `BLOCK` tokens, each below the block of the tokens before it: a tree, in which
prompts share what they begin with. The last block of a prompt may have fewer tokens. What two prompts have in
common is found to the token, in the middle of a block too.

A block's arrays are copies that nobody writes to. What is found is joined into new arrays, so a row never holds
a block, and a block never keeps a row from writing in place.
"""

from __future__ import annotations

import json
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.fingerprint import arrays_fingerprint, base_model_fingerprint
from afm_mlx.engine.prefix_cache_folder import PrefixFolder, StoredBlock, block_name
from afm_mlx.errors import RequestError
from afm_mlx.model.model import is_afm

BLOCK = 64  # tokens of a block: 1.1 MB of the 3B's codes
FOLDER_BUDGET = 8 << 30  # bytes
_VERSION = 1  # of files
_OVERHEAD = 1024  # bytes that Python takes for a block, about
_ID = 4  # bytes of a token's id


@dataclass
class Columns:
    """Keys and values of some tokens, of all blocks of a model.

    Args:
        groups: arrays (arrays of one shape and type, heads, tokens, head_dim).
        places: for each array of the cache, its group and its index there.
    """

    groups: list[mx.array]
    places: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @classmethod
    def of(cls, arrays: Sequence[mx.array], start: int, stop: int) -> Columns:
        """Copy the tokens from `start` to `stop` of arrays (1, heads, tokens, head_dim)."""
        groups: dict[Hashable, list[mx.array]] = {}
        places = []
        for array in arrays:
            group = groups.setdefault((array.shape[1], array.shape[3], array.dtype), [])
            places.append((list(groups.values()).index(group), len(group)))
            group.append(array[:, :, start:stop])
        joined = [mx.contiguous(mx.concatenate(group)) for group in groups.values()]
        return cls(joined, tuple(places))

    @staticmethod
    def joined(parts: Sequence[Columns], tokens: int, apart: bool = False) -> list[mx.array]:
        """The arrays (1, heads, tokens, head_dim) of consecutive parts, up to a number of tokens.

        With `apart`, each array owns its memory; else the arrays of a group are views of one, which is faster.
        """
        if apart:
            return [
                mx.concatenate([p.groups[group][at : at + 1] for p in parts], axis=2)[:, :, :tokens]
                for group, at in parts[0].places
            ]
        groups = [
            mx.concatenate(group, axis=2)[:, :, :tokens]
            for group in zip(*(part.groups for part in parts), strict=True)
        ]
        return [groups[group][at : at + 1] for group, at in parts[0].places]


@dataclass(eq=False)
class _Block:
    """Some tokens behind those of the blocks above.

    Args:
        above: the block before, which holds this one; None for a root, which has no tokens.
        name: the tokens, four bytes each.
        columns: their keys and values.
        stored_as: the name of its file, if it has as many tokens as a block can have.
    """

    above: weakref.ref[_Block] | None = None
    name: bytes = b""
    columns: Columns | None = None
    below: dict[bytes, _Block] = field(default_factory=dict)
    names: list[bytes] = field(default_factory=list)  # of `below`, sorted
    stored_as: str = ""

    @property
    def tokens(self) -> int:
        return len(self.name) // _ID

    @property
    def nbytes(self) -> int:
        columns = 0 if self.columns is None else self.columns.nbytes
        return columns + len(self.name) + _OVERHEAD

    def nearest(self, name: bytes) -> tuple[_Block | None, int]:
        """The block below that begins with most of these tokens, and with how many."""
        # In order, it is one of the two that these tokens lie between.
        at = bisect_left(self.names, name)
        best, most = None, 0
        for neighbour in self.names[max(0, at - 1) : at + 1]:
            common = _common(neighbour, name)
            if common > most:
                best, most = self.below[neighbour], common
        return best, most

    def add(self, block: _Block) -> None:
        self.below[block.name] = block
        self.names.insert(bisect_left(self.names, block.name), block.name)

    def remove(self, block: _Block) -> None:
        del self.below[block.name]
        del self.names[bisect_left(self.names, block.name)]


class PrefixCache:
    """Keys and values of prompts and answers under a budget; what was not used for longest makes room.

    It is for one model, and for the engines of one thread. What one owner's rows have left is found by that
    owner's rows only, and under the same adapter and storage. The model's weights must not change meanwhile.

    Rows of AFM models use it, int8 and float, with a sliding window as long as nothing was forgotten; and those
    of mlx-lm's zoo whose caches are all mlx-lm's `KVCache`. Rows of other models, and rows that come with a
    cache of their own, don't.

    With a folder, whole blocks are written there too, and found by later processes that run the same model.
    They hold what was asked and answered: whoever can read the folder can find that out.

    All figures may be read in any thread.

    Args:
        budget: bytes of memory at most.
        folder: path of a folder for blocks; None for none.
        folder_budget: bytes of its files at most.

    Attributes:
        nbytes: bytes in use.
        tokens: tokens that are kept.
        queries: tokens that were looked for.
        hits: those of them that were found.
        evictions: blocks that had to make room.

    Raises:
        RequestError: for a budget below 1, and a folder that can't be used.
    """

    def __init__(
        self, budget: int, folder: str | Path | None = None, folder_budget: int = FOLDER_BUDGET
    ):
        if budget < 1:
            raise RequestError(
                f"The prefix cache's budget is {budget} bytes; at least 1 is needed."
            )
        self.budget = budget
        self.nbytes = self.tokens = self.queries = self.hits = self.evictions = 0
        self._model: weakref.ref[nn.Module] | None = None
        self._roots: dict[Hashable, _Block] = {}
        self._blocks: OrderedDict[_Block, Hashable] = OrderedDict()  # by last use, with their keys
        # Blocks of this step and of the one before: their arrays may still be computed.
        self._newest: list[_Block] = []
        self._newer: list[_Block] = []
        self.folder = None if folder is None else PrefixFolder(folder, folder_budget)
        self._model_name = ""  # in names of files

    def close(self) -> None:
        """Write to the folder what is still to be written; nothing more is read or written there."""
        folder, self.folder = self.folder, None
        if folder is not None:
            folder.close()

    def serve(self, model: nn.Module) -> None:
        """Take a model as the one whose keys and values are kept.

        Raises:
            RequestError: when it is another one already.
        """
        if self._model is None:
            self._model = weakref.ref(model)
            if self.folder is not None:
                self._model_name = _model_name(model)
        if self._model() is not model:
            raise RequestError(
                "The prefix cache holds keys and values of another model; make one for each model."
            )

    def find(
        self, key: Hashable, tokens: Sequence[int], apart: bool = False
    ) -> tuple[list[mx.array], int]:
        """Find what is kept of some tokens.

        Args:
            key: whatever keys and values depend on beside the tokens, and who may see them.
            tokens: ids of the tokens.
            apart: see `Columns.joined`.

        Returns:
            Arrays (1, heads, found tokens, head_dim), as they were kept; and how many tokens were found.
        """
        self.queries += len(tokens)
        path, found = self._path(key, _named(tokens))
        self._touch(path)
        self.hits += found
        parts = [block.columns for block in path if block.columns is not None]
        return (Columns.joined(parts, found, apart) if found else []), found

    def keep(self, key: Hashable, tokens: Sequence[int], arrays: Sequence[mx.array]) -> None:
        """Keep what is not kept yet of some tokens, as far as the budget allows.

        Args:
            key: see `find`.
            tokens: ids of the tokens, from the first on.
            arrays: (1, heads, at least as many tokens, head_dim) each.
        """
        if tokens and arrays:
            per_token = sum(array.nbytes // array.shape[2] for array in arrays)
            self._insert(key, tokens, per_token, lambda *span: Columns.of(arrays, *span))

    def _insert(
        self,
        key: Hashable,
        tokens: Sequence[int],
        per_token: int,
        columns_of: Callable[[int, int], Columns | None],
    ) -> None:
        """Keep tokens of which `columns_of` gives the columns from one to another, if it has them."""
        name = _named(tokens)
        path, _ = self._path(key, name)
        self._touch(path)
        block = root = self._roots.get(key) or _Block(stored_as=self._root_name(key))
        path = []
        new: list[_Block] = []
        for start in range(0, len(tokens), BLOCK):
            part = name[start * _ID : (start + BLOCK) * _ID]
            near, common = block.nearest(part)
            if near is None or common < len(part) // _ID:
                count = len(part) // _ID
                if near is not None and common == near.tokens:  # the same, and more
                    self._remove(near)
                if not self._make_room(count * per_token + len(part) + _OVERHEAD, path):
                    break
                columns = columns_of(start, start + count)
                if columns is None:
                    break
                near = _Block(weakref.ref(block), part, columns)
                if count == BLOCK and self.folder is not None:
                    near.stored_as = block_name(block.stored_as, part)
                block.add(near)
                self._blocks[near] = key
                self.nbytes += near.nbytes
                self.tokens += near.tokens
                new.append(near)
            path.append(near)
            block = near
        self._touch(path)
        if root.below:  # eviction may have taken it out
            self._roots[key] = root
        self._newest += new
        # In one go with the step that is under way, which it may depend on.
        mx.async_eval([near.columns.groups for near in new if near.columns is not None])

    def advance(self) -> None:
        """A step has ended: what was kept in the one before it is now known to be computed."""
        if self._newer:
            mx.eval([block.columns.groups for block in self._newer if block.columns is not None])
            for block in self._newer:
                if self.folder is not None and block.stored_as and block.columns is not None:
                    self.folder.write(block.stored_as, block.columns.places, block.columns.groups)
        self._newer, self._newest = self._newest, []

    def drop_newest(self) -> None:
        """Forget what was kept by a step that raised, and the one before: it may be part of what went wrong."""
        for block in [*self._newer, *self._newest]:
            self._remove_with_all_below(block)
        self._newer, self._newest = [], []

    # -- the folder

    def stored(self, key: Hashable, tokens: Sequence[int]) -> tuple[int, list[str]]:
        """What the folder has beyond memory: the number of the first block, and the names of all."""
        if self.folder is None:
            return 0, []
        name = _named(tokens)
        path, found = self._path(key, name)
        above = path[found // BLOCK - 1].stored_as if found >= BLOCK else self._root_name(key)
        first, names = found // BLOCK, []
        for start in range(first * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
            above = block_name(above, name[start * _ID : (start + BLOCK) * _ID])
            if above not in self.folder:
                break
            names.append(above)
        return first, names

    def take_in(
        self, key: Hashable, tokens: Sequence[int], first: int, stored: Sequence[StoredBlock]
    ) -> None:
        """Keep blocks that were read in the folder.

        Args:
            key, tokens, first: as `stored` was asked and has told.
            stored: the blocks.
        """
        parts = [Columns([array.array() for array in arrays], places) for places, arrays in stored]

        def columns_of(start: int, stop: int) -> Columns | None:
            index = start // BLOCK - first  # below 0 when memory has forgotten those before
            return parts[index] if index >= 0 else None

        if parts:
            known = tokens[: (first + len(parts)) * BLOCK]
            self._insert(key, known, parts[0].nbytes // BLOCK, columns_of)

    def _root_name(self, key: Hashable) -> str:
        return "" if self.folder is None else json.dumps([_VERSION, self._model_name, key])

    # -- the tree

    def _path(self, key: Hashable, name: bytes) -> tuple[list[_Block], int]:
        """Blocks that begin with these tokens, the last one perhaps in part; and how many tokens they share."""
        path: list[_Block] = []
        block, found = self._roots.get(key), 0
        while block is not None and found * _ID < len(name):
            near, common = block.nearest(name[found * _ID : (found + BLOCK) * _ID])
            if near is not None:
                path.append(near)
                found += common
            block = near if common == BLOCK else None
        return path, found

    def _touch(self, path: Sequence[_Block]) -> None:
        """Note a use. A block is always used later than those below it, so that the oldest one has none."""
        for block in reversed(path):
            self._blocks.move_to_end(block)

    def _make_room(self, nbytes: int, path: Sequence[_Block]) -> bool:
        """Remove old blocks, but none of a path that was just used; returns whether that was enough."""
        while self.nbytes + nbytes > self.budget:
            oldest = next(iter(self._blocks), None)
            if oldest is None or oldest in path:
                return False
            self._remove(oldest)
            self.evictions += 1
        return True

    def _remove(self, block: _Block) -> None:
        """Remove a block that has none below it."""
        key = self._blocks.pop(block)
        assert block.above is not None
        above = block.above()
        assert above is not None
        above.remove(block)
        self.nbytes -= block.nbytes
        self.tokens -= block.tokens
        if above.above is None and not above.below:
            self._roots.pop(key, None)

    def _remove_with_all_below(self, block: _Block) -> None:
        for other in list(block.below.values()):
            self._remove_with_all_below(other)
        if block in self._blocks:
            self._remove(block)


def _named(tokens: Sequence[int]) -> bytes:
    """Ids of tokens in bytes, in whose order those with a common beginning are neighbours."""
    return np.array(tokens, ">u4").tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Number of tokens that two names begin with."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count // _ID
    differ = np.frombuffer(one, ">u4", count // _ID) != np.frombuffer(other, ">u4", count // _ID)
    return int(differ.argmax())


def _model_name(model: nn.Module) -> str:
    """What tells a model's keys and values from another's, the type that they are computed in included."""
    parameters = dict(tree_flatten(model.parameters()))
    kinds = {str(p.dtype) for p in parameters.values() if mx.issubdtype(p.dtype, mx.floating)}
    if is_afm(model):
        name = base_model_fingerprint(model)
    else:
        name = arrays_fingerprint(str(model.args), parameters)
    return f"{name} {sorted(kinds)}"
