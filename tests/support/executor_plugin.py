"""A plugin of SGLang beside the one under test: the executor in place of FlashInfer's wrappers.

`install` writes it as an installed package, which SGLang loads in every process that it starts.
With `check`, each layer's attention is compared with the C++ path's on the ledger's own tables, on
the same queries, and a difference ends the server.
"""

from __future__ import annotations

from pathlib import Path

PLUGIN = """
import sys

sys.path.insert(0, {support!r})


def register():
    import flashinfer_executor

    flashinfer_executor.install()
    if {check!r}:
        from sglang_kv.backend_gpu import DeviceAttnBackend

        DeviceAttnBackend._attend = checked(DeviceAttnBackend._attend)


def checked(attend):
    import torch

    from sglang_kv.kernels.attention import decode, extend
    from sglang_kv.kernels.layout import PagedStreams

    def attend_twice(self, query, index, sink_q, options):
        out, lse = attend(self, query, index, sink_q, options)
        tables = self.ledger.streams
        streams = PagedStreams(
            self.token_to_kv_pool.pages,
            tables.table_tensor,
            tables.desc_tensor,
            torch.from_numpy(self._slots),
        )
        more = dict(sink_q=sink_q, return_lse=True, **options)
        if self._indptr is None:
            expected, expected_lse = decode(query, streams, index, **more)
        else:
            expected, expected_lse = extend(query, self._indptr, streams, index, **more)
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
        if lse is not None:
            torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)
        seen["layers"] += 1
        if self._planned and index == 0:
            kind = "decode" if self._indptr is None else "extend"
            seen[kind] += 1
            if seen[kind] in (1, 10, 100):
                print("flashinfer path checked:", seen, self.flashinfer.stats, flush=True)
        return out, lse

    seen = dict(layers=0, decode=0, extend=0)
    return attend_twice
"""


def install(folder: Path, *, check: bool) -> dict[str, str]:
    """Write the plugin below ``folder``; returns the environment that finds it."""
    info = folder / "flashinfer_executor_plugin-0.dist-info"
    info.mkdir(parents=True)
    support = str(Path(__file__).resolve().parent)
    (folder / "flashinfer_executor_plugin.py").write_text(
        PLUGIN.replace("{support!r}", repr(support)).replace("{check!r}", repr(check))
    )
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: flashinfer-executor-plugin\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nflashinfer_executor = flashinfer_executor_plugin:register\n"
    )
    return {"PYTHONPATH": str(folder)}
