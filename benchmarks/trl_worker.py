"""The process that trains with TRL for `benchmarks.trl_peer`: `python -m benchmarks.trl_worker JOB.json`.

consumes     the job: a resolved config, a model folder, steps, threads
produces     one JSON line per step in the job folder's steps.jsonl; TRL's own output goes to standard output and error

TRL's GRPO trainer with a `rollout_func`, its way to multi-turn episodes whose actions are not tool calls: the policy of the
benchmark is a random one that calls nothing. Each turn is sampled by the trainer's own generation (`_generate_single_turn`, which
its tool loop uses too: `generate` of transformers over all episodes that go on, left-padded). Loss, advantages, optimizer, data
loading and the order of things are TRL's.
"""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.trl_episodes import Played, play_batch
from segue.config import Config
from segue.config.root import resolve

STEPS_FILE = "steps.jsonl"


def options(config: Config, folder: str, steps: int, stop_tokens: list[int]) -> dict[str, Any]:
    """The fields of `GRPOConfig`: what Segue's config says, where TRL has a word for it, and nothing that costs time besides."""
    learner, sampling = config.learner, config.rollout
    loss = {"trajectory": "grpo", "token": "dapo", "constant": "dr_grpo"}[learner.aggregation]
    return {
        "output_dir": folder,
        "per_device_train_batch_size": config.batch.groups * config.group.size,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_iterations": 1,
        "num_generations": config.group.size,
        "max_completion_length": sampling.max_turn_tokens,  # of one turn: a turn is one call of its generation
        "generation_kwargs": {"eos_token_id": stop_tokens},
        "temperature": sampling.temperature,
        "top_k": 0,
        "max_steps": steps,
        "learning_rate": learner.lr,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": learner.weight_decay,
        "adam_beta1": learner.adam_betas[0],
        "adam_beta2": learner.adam_betas[1],
        "max_grad_norm": learner.max_grad_norm,
        "epsilon": learner.clip_low,
        "epsilon_high": learner.clip_high,
        "beta": 0.0,
        "loss_type": loss,
        "scale_rewards": "group" if learner.advantage == "grpo" else "none",
        "model_init_kwargs": {"dtype": "float32"},
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "seed": config.seed,
        "save_strategy": "no",
        "logging_steps": steps + 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def train(job: dict[str, Any]) -> None:
    """Train, and tell of each step in the job's folder (`STEPS_FILE`, a line each): seconds since training began,
    sampled tokens in its loss, mean reward."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore")
    import pyarrow
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from envpool.suites import load_suite
    from rollout.chat import ChatRenderer

    torch.set_num_threads(job["threads"])
    config = resolve(tomllib.loads(job["config"]), "the benchmark's config")
    size = config.batch.groups * config.group.size
    suite = load_suite(config.task.env, config.task.args)
    tasks = suite.tasks("train", config.task.train_tasks, config.seed)
    tokenizer = AutoTokenizer.from_pretrained(job["model"], local_files_only=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(job["model"], local_files_only=True))
    threads = ThreadPoolExecutor(size)
    tokens: list[int] = []
    rewards: list[float] = []

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """A batch of episodes. A prompt is the number of a task: what the policy reads comes from its environment."""
        seen: dict[str, int] = {}
        asked = []
        for prompt in prompts:
            asked.append((tasks[int(prompt)], seen.get(prompt, 0)))
            seen[prompt] = seen.get(prompt, 0) + 1

        def generate(contexts: list[list[int]]) -> list[list[int]]:
            ids, _ = trainer._generate_single_turn(contexts, None, {}, trainer.num_generations)
            return [list(map(int, each)) for each in ids]

        played: list[Played] = play_batch(suite, asked, renderer, config, generate, threads)
        tokens.append(sum(sum(episode.mask) for episode in played))
        rewards.append(sum(episode.reward for episode in played) / len(played))
        return {
            "prompt_ids": [episode.prompt for episode in played],
            "completion_ids": [episode.completion for episode in played],
            "logprobs": None,
            "env_mask": [episode.mask for episode in played],
            "episode_reward": [episode.reward for episode in played],
        }

    def reward(completions: list[Any], episode_reward: list[float], **_: Any) -> list[float]:
        return episode_reward

    class Told(TrainerCallback):
        began = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.perf_counter() - self.began
            line = {"step": state.global_step, "seconds": seconds, "tokens": tokens[-1], "reward": rewards[-1]}
            with (Path(job["folder"]) / STEPS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    prompts = pyarrow.table({"prompt": [str(number) for number in range(len(tasks))]})
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=reward,
        args=GRPOConfig(**options(config, job["folder"], job["steps"], list(renderer.stop_tokens))),
        train_dataset=Dataset(InMemoryTable(prompts), fingerprint="tasks"),  # given, because hashing a table pickles pyarrow
        processing_class=tokenizer,
        rollout_func=roll_out,
        callbacks=[Told()],
    )
    trainer.train()
    threads.shutdown()


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
