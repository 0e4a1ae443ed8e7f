"""Hosts whose folders, data, flags or software differ."""

from tests.hosts.case import Case

TMPFS = "mount -t tmpfs tmpfs "
OTHER = r"\S+ is \S+ \((not )?(empty|missing)\), not the same folder as on host-a"
MIXED = "cp {data}.bin {own}/other; printf '\\1' | dd of={own}/other bs=1 seek=40000 conv=notrunc"
BYTE = f"{MIXED}; mount --bind {{own}}/other {{data}}.bin"
WITHOUT = "rm {data}.json"
# The same lengths of documents, other tokens.
SHUFFLED = "{python} -c \"import sys; b=open('{data}.bin','rb').read(); open('{own}/other','wb')"
SHUFFLED += '.write(b[::-1])"; mount --bind {own}/other {data}.bin'
COPIES = "cp -r $(dirname {data}) {own}/data"
ELSEWHERE = [
    *("--data-path", "{own}/data/sources"),
    *("--tokenizer-model", "{own}/data/sources-tokenizer"),
]
BLEND = ["--data-path", "1", "{data}", "1", "{own}/two"]
PLUGIN = ["--plugin", "mine"]
OF_PLUGIN = "mkdir -p {own}/p; echo 'import helper' > {own}/p/mine.py; echo 1 > {own}/p/helper.py"
PATH = {"PYTHONPATH": "{own}/p:{root}"}


def package(name: str, version: str = "99.0") -> str:
    """Shell commands that let a package seem to be installed."""
    folder = "{own}/q/" + f"{name.replace('-', '_')}-{version}.dist-info"
    text = f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
    return f"mkdir -p {folder}; printf '{text}' > {folder}/METADATA"


FAKE = {"PYTHONPATH": "{own}/q:{root}"}
CHANGED = "cp {root}/FILE {own}/changed; echo '# x' >> {own}/changed; "
CHANGED += "mount --bind {own}/changed {root}/FILE"
FOLDERS = {
    "run folder not shared": Case(
        f"host-b: --run-dir {OTHER}", setup=TMPFS + "{shared}; mkdir {run}"
    ),
    "checkpoints on a volume of B": Case(
        f"host-b: --save {OTHER}", setup=TMPFS + "{run}/checkpoints", saved=True
    ),
    "checkpoints on a volume of A": Case(
        f"host-b: --save {OTHER}", setup=TMPFS + "{run}/checkpoints", of="a", saved=True
    ),
    "checkpoints a link, B's volume elsewhere": Case(
        f"host-b: --save {OTHER}",
        before="mkdir {own}/c; mv {run}/checkpoints/* {own}/c; rmdir {run}/checkpoints; "
        "ln -s {own}/c {run}/checkpoints",
        setup=TMPFS + "{own}/c",
        saved=True,
    ),
    "checkpoints a link that leads nowhere on B": Case(
        r"host-b: --save \S+ is \S+ \(missing\), not the same folder as on host-a",
        before="mkdir {own}/c; mv {run}/checkpoints {own}/c; "
        "ln -s {own}/c/checkpoints {run}/checkpoints",
        setup=TMPFS + "{own}/c",
        saved=True,
    ),
    "checkpoints a link that leads nowhere on A": Case(
        r"--save \S+ is a link to \S+, which is missing here|no finished checkpoint",
        before="mkdir {own}/c; mv {run}/checkpoints {own}/c; "
        "ln -s {own}/c/checkpoints {run}/checkpoints",
        setup=TMPFS + "{own}/c",
        of="a",
        saved=True,
    ),
    "checkpoints of a new run on a volume of B": Case(
        f"host-b: --save {OTHER}",
        before="mkdir -p {run}/checkpoints",
        setup=TMPFS + "{run}/checkpoints",
        all=["--use-distributed-optimizer"],
    ),
    "empty checkpoints of a new run, a volume that all share": Case(
        before="mkdir -p {run}/checkpoints/lost+found {own}/volume/lost+found",
        first="mount --bind {own}/volume {run}/checkpoints",
    ),
    "the newest checkpoint a link": Case(
        r"host-b: --save \S+ has no iter_0000002/\S+, which host-a has",
        before="mkdir {own}/c; mv {run}/checkpoints/iter_0000002 {own}/c; "
        "ln -s {own}/c/iter_0000002 {run}/checkpoints/iter_0000002",
        setup=TMPFS + "{own}/c",
        saved=True,
    ),
    "checkpoints on B read-only": Case(
        r"host-b: --save \S+ cannot be written: Read-only",
        setup="mount --bind {run}/checkpoints {run}/checkpoints; "
        "mount -o remount,bind,ro {run}/checkpoints",
        saved=True,
    ),
    "run folder on B read-only": Case(
        r"host-b: --run-dir \S+ cannot be written: Read-only",
        before="mkdir {run}",
        setup="mount --bind {run} {run}; mount -o remount,bind,ro {run}",
    ),
    "tensorboard on a volume of B": Case(
        rf"host-b: \S+/tensorboard {OTHER[4:]}", setup=TMPFS + "{run}/tensorboard", saved=True
    ),
    "tokenizer of the run on a volume of B": Case(
        rf"host-b: \S+/tokenizer {OTHER[4:]}", setup=TMPFS + "{run}/tokenizer", saved=True
    ),
    "metrics.jsonl a link": Case(
        rf"host-b: \S+/metrics.jsonl {OTHER[4:]}|metrics.jsonl is \S+ \(missing\)",
        before="mkdir {own}/m; mv {run}/metrics.jsonl {own}/m; "
        "ln -s {own}/m/metrics.jsonl {run}/metrics.jsonl",
        setup=TMPFS + "{own}/m; touch {own}/m/metrics.jsonl",
        saved=True,
    ),
    "logs on a volume of B": Case(
        rf"host-b: \S+/logs {OTHER[4:]}",
        before="mkdir {run}/logs",
        setup=TMPFS + "{run}/logs",
        saved=True,
    ),
    "data cache of the run on a volume of B": Case(
        f"host-b: --data-cache-path {OTHER}", setup=TMPFS + "{run}/data-cache", saved=True
    ),
    "a data cache that is not shared": Case(
        f"host-b: --data-cache-path {OTHER}",
        all=["--data-cache-path", "{own}/cache"],
        before="mkdir {own}/cache",
        setup=TMPFS + "{own}/cache",
    ),
    "--save that is not shared": Case(
        f"host-b: --save {OTHER}",
        all=["--save", "{own}/save"],
        before="mkdir {own}/save",
        setup=TMPFS + "{own}/save",
    ),
    "--load without a shard on B": Case(
        r"host-b: --load step 2, \d+ files, .* \(host-a: step 2, \d+ files",
        before="cp -r {run} {own}/first; rm -r {run}",
        all=["--load", "{own}/first/checkpoints", "--finetune"],
        setup="mkdir {own}/copy; cp -r {own}/first/checkpoints {own}/copy; "
        "rm {own}/copy/checkpoints/iter_0000002/__0_0.distcp; "
        "mount --bind {own}/copy/checkpoints {own}/first/checkpoints",
        saved=True,
    ),
    "checkpoints on a volume of B, 2 ranks a host": Case(
        f"host-b: --save {OTHER}", setup=TMPFS + "{run}/checkpoints", saved=True, ranks=2
    ),
    "checkpoints on a volume of C": Case(
        "host-c: --save " + OTHER, "abc", 3, setup=TMPFS + "{run}/checkpoints", of="c", saved=True
    ),
}
DATA = {
    "one byte of the .bin, without a .json": Case(
        r"host-b: the \.bin of data set 1 of --data-path [\d,]+ bytes, sha256 \w+ \(host-a: ",
        before=WITHOUT,
        setup=BYTE,
    ),
    "one byte of the .bin, with its .json": Case(
        r"host-b: \S+\.bin has the SHA-256 \w+, but \S+\.json says \w+", setup=BYTE
    ),
    "one byte of the .bin on A": Case(
        r"\S+\.bin has the SHA-256 \w+, but \S+\.json says \w+", setup=BYTE, of="a"
    ),
    "one byte of the .bin, everywhere": Case(
        r"\S+\.bin has the SHA-256 \w+, but \S+\.json says \w+", setup=BYTE, of="ab"
    ),
    "other samples of the same lengths": Case(
        r"host-b: the \.bin of data set 1 of --data-path", before=WITHOUT, setup=SHUFFLED
    ),
    "other documents of the same number of tokens": Case(
        r"host-b: the \.idx of data set 1 of --data-path",
        before=WITHOUT,
        setup="cp {data}.idx {own}/i; printf '\\1' | dd of={own}/i bs=1 seek=60 conv=notrunc; "
        "mount --bind {own}/i {data}.idx",
    ),
    "one byte on C": Case(
        r"host-c: the \.bin of data set 1", "abc", 3, before=WITHOUT, setup=BYTE, of="c"
    ),
    "one byte on B, 2 ranks a host": Case(
        r"host-b: the \.bin of data set 1", ranks=2, before=WITHOUT, setup=BYTE
    ),
    "one byte of the second of two data sets": Case(
        r"host-b: the \.bin of data set 2 of --data-path",
        all=BLEND,
        before="for k in bin idx; do cp {data}.$k {own}/two.$k; done",
        setup="cp {own}/two.bin {own}/other; printf '\\1' >> {own}/x; "
        "dd if={own}/x of={own}/other bs=1 seek=40000 conv=notrunc; "
        "mount --bind {own}/other {own}/two.bin",
    ),
    "a cut .bin": Case(
        r"host-b: the \.bin of data set 1|host-b: \S+\.bin has the SHA-256",
        setup="head -c 50000 {data}.bin > {own}/cut; mount --bind {own}/cut {data}.bin",
    ),
    "data missing": Case(
        r"--data-path \S+: \S+\.idx not found", setup="mount --bind /dev/null {data}.idx"
    ),
    "another weight": Case(
        r"host-b: --data-path 2 \(host-a: 1\)",
        all=["--data-path", "1", "{data}"],
        flags=["--data-path", "2", "{data}"],
    ),
    "another --split": Case(
        r"host-b: --split 90,10,0 \(host-a: 80,20,0", flags=["--split", "90,10,0"]
    ),
    "another tokenizer.json": Case(
        r"host-b: tokenizer\.json of --tokenizer-model sha256 \w+ \(host-a: sha256",
        setup="sed 's/}$/ }/' {tokenizer}/tokenizer.json > {own}/t; echo >> {own}/t; "
        "mount --bind {own}/t {tokenizer}/tokenizer.json",
    ),
    "a file more in the tokenizer": Case(
        r"host-b: merges\.txt of --tokenizer-model sha256 \w+ \(host-a: missing\)",
        setup="cp -r {tokenizer} {own}/t; echo a b > {own}/t/merges.txt; "
        "mount --bind {own}/t {tokenizer}",
    ),
    "the tokenizer missing": Case(
        r"--tokenizer-model \S+(: no such folder| has no tokenizer files)|tokenizer",
        setup=TMPFS + "{tokenizer}",
    ),
    "copies of data and tokenizer at other paths": Case(before=COPIES, flags=ELSEWHERE),
    "copies at other paths, a blend": Case(
        all=BLEND,
        before="mkdir {own}/data; for k in bin idx; do cp {data}.$k {own}/two.$k; "
        "cp {data}.$k {own}/data/x.$k; done",
        flags=["--data-path", "1", "{own}/data/x", "1", "{own}/two"],
    ),
    "copies at other paths, a resume": Case(before=COPIES, flags=ELSEWHERE, saved=True),
    "copies at other paths, 2 ranks a host": Case(before=COPIES, flags=ELSEWHERE, ranks=2),
    "copies at other paths, one byte": Case(
        r"host-b: \S+\.bin has the SHA-256",
        before=COPIES
        + "; printf '\\1' | dd of={own}/data/sources.bin bs=1 seek=40000 conv=notrunc",
        flags=ELSEWHERE,
    ),
}
FLAGS = {
    "learning rate": Case(
        r"host-b: --lr 0\.01 \(host-a: 0\.001\)", flags=["--lr", "1e-2", "--min-lr", "0"]
    ),
    "learning rate on C": Case(
        r"host-c: --lr 0\.01 \(host-a: 0\.001\)", "abc", 3, flags=["--lr", "1e-2"], of="c"
    ),
    "learning rate, 2 ranks a host": Case(r"host-b: --lr 0\.01", ranks=2, flags=["--lr", "1e-2"]),
    "seed": Case(r"host-b: --seed 7 \(host-a: 1234\)", flags=["--seed", "7"]),
    "attention": Case(
        r"host-b: --attention-variant gated \(host-a: sink", flags=["--attention-variant", "gated"]
    ),
    "layers": Case(r"host-b: --num-layers 3 \(host-a: 2", flags=["--num-layers", "3"]),
    "number type": Case(r"host-b: --.*bf16 True", flags=["--bf16"]),
    "layout": Case(
        r"host-b: .*--tensor-model-parallel-size 2 \(host-a: 1",
        flags=["--tensor-model-parallel-size", "2"],
    ),
    "a recipe of the same name": Case(
        r"host-b: --weight-decay 0\.5 \(host-a: ",
        setup="printf 'train-iters = 1\\nweight-decay = 0.5\\n' > {own}/r; "
        "mount --bind {own}/r {tmp}/tiny.toml",
    ),
    "a variable of kernels": Case(
        r"host-b: variable NVTE_FLASH_ATTN 0 \(host-a: missing\)",
        variables={"NVTE_FLASH_ATTN": "0"},
    ),
    "a variable of collectives": Case(
        r"host-b: variable NCCL_ALGO Ring \(host-a: missing\)", variables={"NCCL_ALGO": "Ring"}
    ),
}
# A plugin that both hosts load.
OF_BOTH = {"before": OF_PLUGIN, "everywhere": PATH, "of": "b", "all": PLUGIN}
SOFTWARE = {
    "a plugin of one host": Case(
        r"host-b: .*--plugin|plugin mine", before=OF_PLUGIN, everywhere=PATH, flags=PLUGIN
    ),
    "a plugin that B lacks": Case(
        r"--plugin mine \(--plugin\): no module of that name",
        before=OF_PLUGIN,
        variables=PATH,
        flags=PLUGIN,
        of="a",
        all=PLUGIN,
    ),
    "another plugin of the same name": Case(
        r"host-b: the source of (module mine|--plugin mine) sha256 \w+ \(host-a: sha256",
        setup="printf 'import helper  # x' > {own}/m; mount --bind {own}/m {own}/p/mine.py",
        **OF_BOTH,
    ),
    "another module that a plugin imports": Case(
        r"host-b: the source of module helper sha256 \w+ \(host-a: sha256",
        setup="echo 2 > {own}/h; mount --bind {own}/h {own}/p/helper.py",
        **OF_BOTH,
    ),
    "NCCL of one host": Case(
        r"host-b: version of nvidia-nccl-cu12 99\.0 \(host-a: missing\)",
        before=package("nvidia-nccl-cu12"),
        variables=FAKE,
    ),
    "a CUDA library of one host": Case(
        r"host-b: version of nvidia-cublas-cu12 99\.0 \(host-a: missing\)",
        before=package("nvidia-cublas-cu12"),
        variables=FAKE,
    ),
    "another Triton": Case(
        r"host-b: version of triton 99\.0 \(host-a: ", before=package("triton"), variables=FAKE
    ),
    "another torch": Case(
        r"host-b: version of torch 99\.0 \(host-a: 2", before=package("torch"), variables=FAKE
    ),
    "another megasink": Case(
        r"host-b: megasink/errors\.py sha256 \w+ \(host-a: sha256",
        setup=CHANGED.replace("FILE", "megasink/errors.py"),
    ),
    "another Megatron": Case(
        r"host-b: the source of megatron\.core sha256 \w+ \(host-a: sha256",
        setup=CHANGED.replace("{root}/FILE", "{megatron}/core/rerun_state_machine.py"),
    ),
}
