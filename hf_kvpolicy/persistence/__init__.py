"""A cache on disk: `cache.save_pretrained(directory)` and `load_cache(directory, model)`.

A directory holds two files. `cache.safetensors` has every buffer as it lies: keys and values of the slots in use,
pristine keys of re-rotated rows, the maps that give slots their meaning, the decode tail's map, the mask of columns
fed, and the queries of a prompt whose selection still waits. Slots keep their places, so that a loaded cache continues
bit for bit like the saved one (same torch, device and thread count); slots beyond those in use are not written.

`cache.json` has the rest: format and format version, policy and the constructor options that rebuild it, geometry,
dtypes, the manifest with its SHA-256, generations, frontier, counts, budget, statistics, the facts of an open segment,
name, dtype and shape of every tensor, the SHA-256 of the tensor file, the versions of torch and transformers. A
digest over all of it stands beside it. Digests find truncation and drift; they do not authenticate: who can write the
directory can also write digests.

Guarantees
- A directory appears complete or not at all: it is written under a temporary name beside its place and renamed.
  Replacing an earlier save renames twice; a crash between the two leaves the earlier one under its temporary name.
- Loading verifies files, digests, format, policy, geometry, dtype, checkpoint and manifest, and audits rows and bytes,
  before a cache is returned; a model that was not attached stays so when loading is refused.
- A loaded cache goes on with the identity and generations of the saved one. Load twice only to `fork()` one of them.
- Tokens that wait for acceptance are refused: saving must not decide for the caller.
"""

from .load import load_cache
from .save import save_cache

__all__ = ["load_cache", "save_cache"]
