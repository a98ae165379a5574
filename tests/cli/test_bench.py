"""`qgraph bench`: llama-bench's fields, its arithmetic, and what is timed."""

import json
import statistics

from qwen3next_ggml.session import Session

FIELDS = """build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params n_batch n_ubatch
n_threads type_k type_v n_gpu_layers flash_attn devices load_mode repack n_prompt n_gen n_depth test_time avg_ns stddev_ns avg_ts
stddev_ts samples_ns samples_ts""".split()


def test_json_has_llama_benchs_fields(qgraph, bard):
    result = qgraph("bench", "-p", 24, "-n", 3, "-r", 3, "-t", 1, "-o", "json")
    assert result.exit_code == 0, result.stderr
    pp, tg = json.loads(result.stdout)
    assert set(FIELDS) <= set(pp)
    assert (pp["n_prompt"], pp["n_gen"], tg["n_prompt"], tg["n_gen"]) == (24, 0, 0, 3)
    assert pp["model_filename"] == str(bard) and pp["n_threads"] == 1 and pp["load_mode"] == "mmap" and not pp["repack"]
    for row, n in ((pp, 24), (tg, 3)):
        assert len(row["samples_ns"]) == 3
        assert row["samples_ts"] == [1e9 * n / ns for ns in row["samples_ns"]]
        assert row["avg_ns"] == round(statistics.mean(row["samples_ns"]))
        assert row["stddev_ts"] == statistics.stdev(row["samples_ts"])


def test_markdown_is_a_table(qgraph):
    lines = qgraph("bench", "-p", "8,16", "-n", 0, "-r", 1, "-t", 1, "-fa", "on,off").stdout.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["model", "size", "params", "backend", "threads", "fa", "test", "t/s"]
    assert [row[4:7] for row in cells[2:]] == [["1", "1", "pp8"], ["1", "1", "pp16"], ["1", "0", "pp8"], ["1", "0", "pp16"]]
    assert len({len(line) for line in lines}) == 1


def test_what_is_run(qgraph, monkeypatch):
    """One warm-up and the repetitions, each from an empty context; generation goes token by token after the depth."""
    calls, decode = [], Session.decode

    def watched(self, tokens, **options):
        calls.append((self.n_past(), len(tokens)))
        return decode(self, tokens, **options)

    monkeypatch.setattr(Session, "decode", watched)
    qgraph("bench", "-p", 5, "-n", 0, "-r", 2, "-t", 1)
    assert calls == [(0, 5)] * 3
    calls.clear()
    qgraph("bench", "-p", 0, "-n", 2, "-d", 7, "-r", 1, "-t", 1, "--no-warmup")
    assert calls == [(0, 7), (7, 1), (8, 1)]


def test_nothing_to_measure(qgraph):
    result = qgraph("bench", "-p", 0, "-n", 0)
    assert result.exit_code == 2 and "nothing to measure" in result.stderr
    assert qgraph("bench", "-p", "5,x").exit_code == 2
