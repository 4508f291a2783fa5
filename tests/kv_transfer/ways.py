"""Puts between whole pools whose blocks hold a single tensor."""

from array import array
from collections.abc import Sequence

from kv_transfer.lease import Region
from kv_transfer.transport import BlockAddresses, CopyPath, Runs


def runs_between(
    here: Sequence[Region],
    there: Sequence[Region],
    length: int,
    sources: Sequence[int] = (0,),
    targets: Sequence[int] = (0,),
) -> Runs:
    """Of each block its first `length` bytes; regions that follow on are of equal block count."""
    source, target = (
        BlockAddresses(
            array("Q", [region.base_address for region in regions]),
            regions[0].num_blocks,
            array("Q", [0]),
            array("Q", [regions[0].num_bytes // regions[0].num_blocks]),
        )
        for regions in (here, there)
    )
    path = CopyPath(source, target, array("Q", [length]), tuple(r.rkey for r in there))
    return Runs(path, array("Q", sources), array("Q", targets))
