"""Hugging Face's own client on the cache that trireme shares with it.

Called with `reads` after trireme's download, and with `writes` before trireme reads. The
environment names the Hub and the cache. Prints the snapshot's path.
"""

import pathlib
import sys

import huggingface_hub as hub

REPO = "org/model"


def reads() -> str:
    """Everything here is found without a request, and the cache is in order."""
    snapshot = hub.snapshot_download(REPO, local_files_only=True)
    for name in ["config.json", "model.safetensors", "tokenizer.json"]:
        path = hub.hf_hub_download(REPO, name, local_files_only=True)
        assert pathlib.Path(path).parent == pathlib.Path(snapshot), path
        assert hub.try_to_load_from_cache(REPO, name) == path
    scan = hub.scan_cache_dir()
    assert not scan.warnings, scan.warnings
    (repo,) = scan.repos
    assert repo.repo_id == REPO and set(repo.refs) == {"main"}, repo
    assert repo.nb_files == 3, repo
    return snapshot


def writes() -> str:
    """A whole download by the client, README and all."""
    return hub.snapshot_download(REPO)


print({"reads": reads, "writes": writes}[sys.argv[1]]())
