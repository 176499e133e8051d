"""The torchdata pipeline: in order, the same inline as in a thread, and a refusal keeps its sentence."""

from __future__ import annotations

import pytest
import torch
from learner_data import batch_of, learner_config, prepare_batch, random_batch, random_log

from learner.batches import BatchRefused
from learner.pipeline import BatchPipeline


@pytest.mark.parametrize("prefetch", [True, False])
def test_batches_come_out_prepared_and_in_order(prefetch: bool) -> None:
    config = learner_config()
    pipeline = BatchPipeline(config, prefetch=prefetch)
    batches = [random_batch(seed, step=3 + seed) for seed in range(3)]
    pipeline.put(batches[0])
    pipeline.put(batches[1])
    found = [pipeline.take(), pipeline.take()]
    pipeline.put(batches[2])
    found.append(pipeline.take())
    pipeline.close()
    for batch, prepared in zip(batches, found, strict=True):
        want = prepare_batch(batch, config)
        assert prepared.step == batch.step and prepared.stats == want.stats
        for mine, theirs in zip(prepared.minibatches[0], want.minibatches[0], strict=True):
            assert torch.equal(mine.row.tokens, theirs.row.tokens)
            assert all(torch.equal(mine.row.fields[name], theirs.row.fields[name]) for name in theirs.row.fields)


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_refusal_arrives_as_its_own_sentence(prefetch: bool) -> None:
    import numpy as np

    pipeline = BatchPipeline(learner_config(), prefetch=prefetch)
    pipeline.put(batch_of([[(random_log(np.random.default_rng(0), 1, [4]), [1.0])]]))
    with pytest.raises(BatchRefused) as error:
        pipeline.take()
    assert str(error.value) == "episode 0 of group 10: weight version 4 has no step"
    pipeline.close()


def test_after_close_there_is_nothing_more() -> None:
    pipeline = BatchPipeline(learner_config(), prefetch=True)
    pipeline.close()
    with pytest.raises(StopIteration):
        pipeline.take()
