"""Generation: forwards one token at a time over a key/value cache, each step open to its script."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import _core
from .errors import InputError, NonFiniteError, NotReachedError, OutOfOrderError
from .trace import StepsSaved, Tracer

if TYPE_CHECKING:
    from .model import StandardizedTransformer

__all__ = ["GenerationTracer", "Sampling", "StepIterator"]


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from the logits of a step.

    Greedy by default. The arithmetic, in float32, and its order (repetition penalty, temperature,
    top-k, top-p) are those of transformers' logits processors.

    Attributes:
        do_sample: draw from the distribution; else the likeliest token is taken.
        temperature: the logits are divided by it; above 0.
        top_k: only the k likeliest tokens are drawn from; None for all.
        top_p: only the likeliest tokens that together reach this probability; in (0, 1].
        repetition_penalty: logits of tokens that have occurred are divided by it where positive and
            multiplied where negative (Keskar et al., arXiv:1909.05858); above 0, 1 for none.
        seed: of the draws; None draws from torch's default generator.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "repetition_penalty"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}; give a number above 0")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; give a number above 0, at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k is {self.top_k}; give 1 or more, or None for all tokens")

    def chooser(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """A function of logits [batch, vocab] and the ids so far [batch, seq] that gives tokens [batch]."""
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)

        def choose(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            logits = logits.detach().to("cpu", torch.float32)
            if not self.do_sample:
                return self._penalised(logits, ids).argmax(-1)
            return torch.multinomial(self.distribution(logits, ids), 1, generator=generator).squeeze(1)

        return choose

    def distribution(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Probabilities [batch, vocab] that a token is drawn with, of float32 logits [batch, vocab] and
        the ids so far [batch, seq]."""
        return self._restricted(self._penalised(logits, ids) / self.temperature).softmax(-1)

    def _penalised(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.repetition_penalty == 1:
            return scores
        occurred = scores.gather(1, ids)
        penalty = self.repetition_penalty
        return scores.scatter(1, ids, torch.where(occurred < 0, occurred * penalty, occurred / penalty))

    def _restricted(self, scores: torch.Tensor) -> torch.Tensor:
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ascending, order = scores.sort()
            tail = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            tail[:, -1] = False
            scores = scores.masked_fill(tail.scatter(1, order, tail), -torch.inf)
        return scores


class StepIterator:
    """`tracer.iter[...]`: the steps of a generation, by index, slice or list.

    Going from one step to another runs the steps between. An open slice ends with the generation; a
    bounded one, an index or a list that the generation does not reach raises `NotReachedError`.
    """

    def __init__(self, tracer: GenerationTracer) -> None:
        self._tracer = tracer

    def __getitem__(self, steps: Any) -> Iterator[int]:
        if isinstance(steps, slice):
            return self._slice(steps)
        listed = list(steps) if isinstance(steps, Iterable) else [steps]
        return self._walk([self._number(step) for step in listed], bounded=True)

    def __iter__(self) -> Iterator[int]:
        return self[:]

    def _number(self, step: Any) -> int:
        if isinstance(step, bool):
            raise TypeError(f"tracer.iter takes integers, slices and lists, not {step}")
        try:
            number = operator.index(step)
        except TypeError:
            raise TypeError(f"tracer.iter takes integers, slices and lists, not {type(step).__name__}") from None
        if number < 0:
            raise ValueError(f"step {number}: how many steps there are is known only when they have run; count from 0")
        if number >= self._tracer.max_new_tokens:
            raise NotReachedError(
                f"step {number} is not reached: max_new_tokens is {self._tracer.max_new_tokens}, steps 0 to "
                f"{self._tracer.max_new_tokens - 1}"
            )
        return number

    def _slice(self, steps: slice) -> Iterator[int]:
        start = 0 if steps.start is None else self._number(steps.start)
        stride = 1 if steps.step is None else operator.index(steps.step)
        if stride < 1:
            raise ValueError(f"tracer.iter with a stride of {stride}: steps run forward only")
        if steps.stop is None:
            return self._walk(itertools.count(start, stride), bounded=False)
        wanted = range(start, operator.index(steps.stop), stride)
        if operator.index(steps.stop) < 0 or wanted:
            self._number(wanted[-1] if wanted else steps.stop)
        return self._walk(wanted, bounded=True)

    def _walk(self, steps: Iterable[int], bounded: bool) -> Iterator[int]:
        for step in steps:
            if not self._tracer._go_to(step):
                if bounded:
                    raise NotReachedError(
                        f"step {step} is not reached: the generation ended after {self._tracer.step + 1} steps, with "
                        "an end-of-text token. Loop over tracer.iter[:] to take what comes."
                    )
                return
            yield step


class GenerationTracer(Tracer):
    """A generation, open inside `with model.generate(prompt) as tracer:`.

    Step k is the forward that gives new token k: step 0 runs over the prompt, each later one over the
    token before. Values are those of the current step; `for step in tracer.iter[:]` goes through
    them. Leaving the block finishes the generation; `tracer.stop()` or an exception ends it.
    `tracer.saved` holds a list for each site, one value a step.
    """

    max_new_tokens: int
    _finished: bool

    def __init__(
        self,
        model: StandardizedTransformer,
        inputs: _core.Inputs,
        max_new_tokens: int,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        sampling: Sampling,
    ) -> None:
        super().__init__(model, inputs)
        vars(self).update(
            saved=StepsSaved(),
            max_new_tokens=max_new_tokens,
            _step=0,
            _eos=torch.tensor(eos_token_ids, dtype=torch.long),
            _pad=pad_token_id,
            _choose=sampling.chooser(),
            _step_inputs=None,
            _ids=None,
            _prompt_length=0,
            _ended=None,
            _finished=False,
        )

    def _start(self, inputs: _core.Inputs) -> Any:
        core = self._model._core
        self._step_inputs = core.generation_prompt(inputs, self.max_new_tokens)
        self._ids = self._step_inputs.input_ids.clone()
        self._prompt_length = self._ids.shape[1]
        self._ended = torch.zeros(len(self._ids), dtype=torch.bool)
        return core.trace(self._step_inputs)

    @property
    def step(self) -> int:
        """The current step, from 0."""
        return self._step

    @property
    def iter(self) -> StepIterator:
        """The steps: `for step in tracer.iter[:]`, `[a:b]`, `[k]`, `[[0, 3]]`."""
        return StepIterator(self)

    def all(self) -> Iterator[int]:
        """Every step, as `iter[:]`."""
        return self.iter[:]

    @property
    def result(self) -> torch.Tensor:
        """Token ids [batch, prompt + generated]; rows that ended early are filled with the pad token.

        Inside the block, reading it runs the generation to its end. After `stop()` or an exception,
        what had been generated. On a tracer that was never opened it runs the whole generation.
        """
        if "_inputs" in vars(self):
            with self:
                pass
        if self._core is not None:
            self._run_out()
        return self._ids

    @property
    def new_tokens(self) -> torch.Tensor:
        """The generated part of `result`, [batch, generated]."""
        return self.result[:, self._prompt_length :]

    @property
    def text(self) -> str | list[str]:
        """The generated text, without special tokens; a list for a batch of several prompts."""
        texts = [self._model.tokenizer.decode(row, skip_special_tokens=True) for row in self.new_tokens.tolist()]
        return texts[0] if len(texts) == 1 else texts

    def _go_to(self, step: int) -> bool:
        """Run on to the start of `step`. False if the generation ends before."""
        if self._core is None:
            raise OutOfOrderError(f"step {step} was asked for after its generation had ended")
        if step < self.step:
            raise OutOfOrderError(
                f"step {step} was asked for, but the generation already stands at step {self.step}. Go on with "
                f"tracer.iter[{self.step + 1}:], or open another generation."
            )
        while self.step < step and self._advance():
            pass
        return self.step == step and not self._finished

    def _advance(self) -> bool:
        """Finish the current step and open the next. False if there is none."""
        if self._finished:
            return False
        if self._schedule is not None:
            self._schedule.run(self)
        logits = self._core.finish()[:, -1]
        self._check_finite(logits)
        tokens = self._choose(logits, self._ids)
        tokens = torch.where(self._ended, self._pad, tokens)
        self._ended |= torch.isin(tokens, self._eos)
        self._ids = torch.cat([self._ids, tokens[:, None]], 1)
        self._finished = bool(self._ended.all()) or self.step + 1 == self.max_new_tokens
        if self._finished:
            return False
        self._step_inputs = _core.following(self._step_inputs, tokens)
        following = self._model._core.trace(self._step_inputs)
        self._core.hand_over(following)
        self._core = following
        if self._schedule is not None:
            self._schedule.restart()
            self._armed = self._schedule.armed
        self._step += 1
        return True

    def _check_finite(self, logits: torch.Tensor) -> None:
        """Refuse rows [batch, vocab] whose largest number is none: an overflow would read as token 0."""
        largest = logits.amax(-1)
        if largest.isfinite().all():
            return
        row = int(largest.isfinite().logical_not().nonzero()[0])
        raise NonFiniteError(
            f"step {self.step} of the generation has no token to choose: the largest logit of prompt {row} is "
            f"{largest[row].item()}. vlscope.first_nonfinite(model, prompt) names the value where that begins; "
            "float16 overflows where bfloat16 and float32 do not."
        )

    def _run_out(self) -> None:
        while self._advance():
            pass

    def _complete(self) -> None:
        self._run_out()

    def _close(self) -> None:
        super()._close()
        self._step_inputs = None  # and with it the cache
