"""A demo small enough for a CPU and still real: a model of 10^5 parameters that adds two numbers, often wrongly.

`prepare` makes a byte-level tokenizer, a Qwen2-shaped model trained with next-token loss, and questions for either
framework. The corpus has the right answer 40 % of the time and one too many 60 % of the time: the reference model then
knows the sum and prefers a neighbour, so that an exact-answer reward has room to rise and the KL from the reference to
grow. (A model stopped halfway through a clean corpus is merely ignorant, and 40 steps of GRPO did not improve it.)
"""

import fcntl
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

LARGEST = 29  # both numbers are between 0 and this, inclusive
WRONG_SHARE = 0.6  # of the corpus: the answer is one too large
LENGTH = 10  # tokens of "29+29=", "59", end of sequence, padding
STEPS, BATCH, LEARNING_RATE, WARM_UP = 600, 128, 3e-3, 20
TRAIN_ROWS, VAL_ROWS = 2048, 64
SEED = 0
PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"


def prepare(directory: str | Path) -> Path:
    """Make the demo in `directory`, in some 20 s, or find it there from before.

    Leaves `model/` (model and tokenizer), `train.parquet` and `val.parquet` (verl), `prompts.jsonl` (OpenRLHF) and
    `stamp.json`. The stamp holds a hash of this file: what an older version made is made again. Seeded.

    Raises:
        FileExistsError: `directory` holds files and no stamp: it is somebody else's.
    """
    directory = Path(directory).resolve()
    stamp = directory / "stamp.json"
    wanted = {"sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    if directory.exists() and not stamp.exists() and any(f.name != ".lock" for f in directory.iterdir()):
        raise FileExistsError(f"{directory} holds files that kl_plugins.cpu.addition did not make; name an empty one")
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs started together share one demo
        if not stamp.exists() or json.loads(stamp.read_text()) != wanted:
            # Written first as "unfinished", so that an interrupted directory is known as ours and made again.
            stamp.write_text(json.dumps({"sha256": "unfinished"}))
            tokenizer = make_tokenizer()
            tokenizer.save_pretrained(directory / "model")
            train_model(tokenizer).save_pretrained(directory / "model")
            write_questions(directory)
            stamp.write_text(json.dumps(wanted))
    return directory


def make_tokenizer() -> Any:
    """A tokenizer with one token a byte and no merges: verl's agent loop wants a newline to be exactly one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, EOS, BOS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + len(alphabet),
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        padding_side="left",
        # A conversation is its text and nothing else: the question ends in "=", and the answer follows.
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )


def train_model(tokenizer: Any) -> Any:
    """A two-layer Qwen2 of 0.12 million parameters, trained on the corpus; returned on the CPU in float32.

    On one thread: the matrices are too small for more, and the result then is the same on any number of cores.
    """
    import torch
    from rich.console import Console
    from rich.progress import track
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=264,  # 259 tokens, rounded up to a multiple of 8
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32, the least that vLLM's CPU attention takes
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    right, one_more, is_answer = _corpus(tokenizer)
    draw = torch.Generator().manual_seed(SEED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / WARM_UP) * (1 - n / STEPS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in track(range(STEPS), "training the reference model", console=Console(stderr=True), transient=True):
        rows = torch.randint(len(right), (BATCH,), generator=draw)
        wrong = torch.rand(BATCH, 1, generator=draw) < WRONG_SHARE
        tokens = torch.where(wrong, one_more[rows], right[rows])
        mask = torch.where(wrong, is_answer[1][rows], is_answer[0][rows])[:, 1:]
        logits = model(tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[mask], tokens[:, 1:][mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    torch.set_num_threads(threads)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def _corpus(tokenizer: Any) -> tuple[Any, Any, tuple[Any, Any]]:
    """Every question with its right answer and with one more, [questions, LENGTH], and where their answers are."""
    import torch

    def rows(excess: int) -> tuple[Any, Any]:
        tokens, mask = [], []
        for a in range(LARGEST + 1):
            for b in range(LARGEST + 1):
                question = tokenizer(f"{a}+{b}=").input_ids
                answer = [*tokenizer(str(a + b + excess)).input_ids, tokenizer.eos_token_id]
                rest = LENGTH - len(question) - len(answer)
                tokens.append(question + answer + [tokenizer.pad_token_id] * rest)
                mask.append([False] * len(question) + [True] * len(answer) + [False] * rest)
        return torch.tensor(tokens), torch.tensor(mask)

    right, right_mask = rows(0)
    one_more, one_more_mask = rows(1)
    return right, one_more, (right_mask, one_more_mask)


def write_questions(directory: Path) -> None:
    """Write `train.parquet` and `val.parquet` in verl's columns, `prompts.jsonl` in OpenRLHF's."""
    import pyarrow
    import pyarrow.parquet

    draw = random.Random(SEED)
    pairs = [(draw.randint(0, LARGEST), draw.randint(0, LARGEST)) for _ in range(TRAIN_ROWS + VAL_ROWS)]
    rows = [
        {
            "data_source": "addition",
            "ability": "math",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": i},
        }
        for i, (a, b) in enumerate(pairs)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:TRAIN_ROWS]), directory / "train.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[TRAIN_ROWS:]), directory / "val.parquet")
    lines = [json.dumps({"input": r["prompt"], "label": r["reward_model"]["ground_truth"]}) for r in rows[:TRAIN_ROWS]]
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """verl's custom reward function: 1 for the exact answer, 0 for any other text."""
    return float(solution_str.strip() == ground_truth)


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **_: Any) -> dict[str, Any]:
    """OpenRLHF's reward function over a list of samples: 1 for the exact answer, 0 for any other text.

    Args:
        queries: prompt and response as one text, special tokens included.
        prompts: the prompt alone.
        labels: the right answers.
    """
    import torch

    answers = [q.removeprefix(p).split(EOS)[0].replace(PAD, "").strip() for q, p in zip(queries, prompts, strict=True)]
    exact = torch.tensor([float(answer == label) for answer, label in zip(answers, labels, strict=True)])
    return {"rewards": exact, "scores": exact, "extra_logs": {"exact": exact}}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m kl_plugins.cpu.addition DIRECTORY")
    print(prepare(sys.argv[1]))
