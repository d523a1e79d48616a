"""Make a quantized (or repacked) copy of a model: console lines and output files.

``quantize`` works in steps: every tensor's type is decided first, which finds all problems of the request, and the
result is announced and compared with the free disk space; then the tensors are converted one after another, a piece of
rows at a time, into files that get their names only when they are complete. A killed run is continued by the same
command.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ikpy.errors import IkpyError, ResourceError, UsageError, escaped
from ikpy.gguf.atomic import check_replaceable, write_whole
from ikpy.gguf.disk_space import room_for
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.splits import output_prefix, split_path
from ikpy.quants import registry
from ikpy.quants.mixture import TypeOptions
from ikpy.quants.model_shape import EXTRA_OUTPUT, OUTPUT, TOKEN_EMBEDDING
from ikpy.tools.model_logs import ftype_text
from ikpy.tools.quantize_files import OutputFile, output_files
from ikpy.tools.quantize_job import job_digest
from ikpy.tools.quantize_metadata import own_file_type, repacked_ftype
from ikpy.tools.quantize_plan import (
    INTERNAL,
    MIB,
    Plan,
    QuantizeOptions,
    RefusedError,
    Step,
    make_plan,
    refuse_without_imatrix,
    size_text,
)
from ikpy.tools.quantize_progress import Display, PlainDisplay
from ikpy.tools.quantize_prune import changed_kinds, kept_tensors
from ikpy.tools.quantize_target import Allocation, allocate
from ikpy.tools.resumable import ResumableOutput, tensor_places
from ikpy.tools.tensor_convert import convert_rows

Print = Callable[[str], None]
# Input that may stay in memory after its conversion.
RELEASED_BYTES = 64 * MIB


class Quantizer:
    """One run of the tool; ``out`` and ``display`` receive text with its line ends."""

    def __init__(self, file: GGUFFile, output: str, options: QuantizeOptions, *, out: Print, display: Display):
        self.file = file
        self.output = output
        self.options = options
        self.out, self.display = out, display
        self.done = self.total = 0

    def err(self, text: str) -> None:
        """Text for standard error."""
        self.display.write(text)

    def run(self) -> Plan:
        """Plan and convert; raises IkpyError. Nothing is written in a dry run."""
        options = self.options
        self._check_files()
        if options.imatrix and not options.repack:
            self.err(f"================================ Have weights data with {len(options.imatrix.values)} entries\n")
        plan = self._plan()
        self.total = len(kept_tensors(self.file, options.prune_layers))
        if self.total < len(self.file.tensors):
            self.err(f"{INTERNAL}: leaving out {len(self.file.tensors) - self.total} tensors in pruned blocks\n")
        if options.prune_layers and (sentence := changed_kinds(self.file, options.prune_layers)):
            self.err(f"WARNING: --prune-layers: {sentence}\n")
        if options.repack and plan.problem is None:
            if not options.prune_layers and all(step.type == step.source_type for step in plan.steps):
                self.out(f"=========================== {INTERNAL}: nothing to do for only_repack option\n")
                return plan
            self._print_repack_summary()
        if options.extra_output_type and not options.repack:
            duplicated = OUTPUT if OUTPUT in self.file.tensors else TOKEN_EMBEDDING
            self.err(f"{'X' * 45} Will duplicate {duplicated} as {options.extra_output_type}\n")
        if options.save_recipe and plan.problem is None:
            self._save_recipe(plan)
        if plan.problem is not None or options.dry_run:
            self._show_plan(plan)
            self._print_sizes(plan)
            self._announce(plan, output_files(self.file, self.output, options, plan))
            return plan
        files = self._wanted(output_files(self.file, self.output, options, plan))
        self._announce(plan, files)
        if files:
            self._write(files)
        self._print_sizes(plan)
        return plan

    # planning

    def _plan(self) -> Plan:
        if not self.options.target.is_given:
            return make_plan(self.file, self.options)
        allocation = allocate(self.file, self.output, self.options, self.display)
        self._print_choice(allocation)
        return make_plan(self.file, self.options, allocation.types)

    def _save_recipe(self, plan: Plan) -> None:
        path = self.options.save_recipe
        try:
            write_whole(path, plan.recipe().encode())
        except OSError as error:
            raise ResourceError(f"--save-recipe {path}: cannot write: {error.strerror or error}") from error
        self.err(f"{INTERNAL}: wrote the decisions to {path}; --custom-q {path} repeats them\n")

    def _print_choice(self, allocation: Allocation) -> None:
        for line in allocation.report():
            self.err(f"{INTERNAL}: {line}\n")

    def _check_files(self) -> None:
        """Refuse an input that is no model, and outputs that are inputs or cannot be written."""
        if self.file.get("general.type") == "imatrix":
            raise UsageError("this is no model but an importance matrix; give it with --imatrix")
        if not self.options.dry_run:
            self._check_paths()
        if self.options.save_recipe:
            self._refuse_inputs([self.options.save_recipe])

    def _check_paths(self) -> None:
        outputs = [self.output]
        if self.options.keep_split and len(self.file.shards) > 1:
            prefix, count = output_prefix(self.output), len(self.file.shards)
            outputs = [split_path(prefix, index, count) for index in range(count)]
        self._refuse_inputs(outputs)
        recipe = self.options.save_recipe
        if recipe and os.path.realpath(recipe) in map(os.path.realpath, outputs):
            raise UsageError(f"--save-recipe {recipe}: this is the output; give another name")
        for path in outputs:
            if os.path.isdir(path) or path.endswith(os.sep):
                raise UsageError(f"{path} is a folder; name a file")
            try:
                check_replaceable(path)
            except OSError as error:
                raise UsageError(f"{path}: {error.strerror}") from None
        folder = os.path.dirname(os.path.abspath(self.output))
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot create folder {folder}: {error.strerror}") from None

    def _refuse_inputs(self, outputs: list[str]) -> None:
        inputs = {os.path.realpath(shard.path): "the input" for shard in self.file.shards}
        if self.options.imatrix_path:
            inputs[os.path.realpath(self.options.imatrix_path)] = "the importance matrix"
        inputs |= {os.path.realpath(path): "a file of rules" for path in self.options.recipe_paths}
        for path in outputs:
            if what := inputs.get(os.path.realpath(path)):
                raise UsageError(f"{path} is {what}; give another output name")

    def _wanted(self, files: list[OutputFile]) -> list[OutputFile]:
        """Without the files that exist, if those are to be left alone."""
        if not self.options.partial_requant:
            return files
        kind = "output file" if len(files) == 1 else "split file"
        wanted = []
        for file in files:
            if os.path.exists(file.layout.path):
                self.err(f"{kind} {file.layout.path} exists, skipping\n")
                self.done += len(file.steps)
            else:
                wanted.append(file)
        return wanted

    # console

    def _print_repack_summary(self) -> None:
        repacked = registry.ftype_display_name(repacked_ftype(own_file_type(self.file)))
        self.out(f"===================== Model ftype: {ftype_text(self.file)}: Repacked ftype: {repacked}\n")

    def _show_plan(self, plan: Plan) -> None:
        for step in plan.steps:
            self._begin_line(step)
            self._end_line(step)
        problem = plan.problem
        if isinstance(problem, RefusedError):
            self._begin_line(problem.step, refused=True)
        if problem is not None:
            raise problem

    def _begin_line(self, step: Step, *, refused: bool = False) -> None:
        self.done += 1
        shape = (*step.source.shape, 1, 1, 1)[:4]
        dims = ", ".join(f"{n:5d}" for n in shape)
        name = step.source.name if step.name == EXTRA_OUTPUT else step.name
        self.err(f"[{self.done:4d}/{self.total:4d}] {escaped(name):>36} - [{dims}], type = {step.source_type:>6}, ")
        self.err(step.note)
        if step.type != step.source_type and not refused and not self.options.repack:
            self.err(f"converting to {step.type} .. ")

    def _end_line(self, step: Step) -> None:
        before, after = step.source.nbytes / MIB, step.nbytes / MIB
        if self.options.repack:
            self.err(f"size = {before:8.3f} MB, type = {step.type}\n")
        elif step.type == step.source_type:
            self.err(f"size = {before:8.3f} MB\n")
        else:
            self.err(f"size = {before:8.2f} MiB -> {after:8.2f} MiB\n")

    def _announce(self, plan: Plan, files: list[OutputFile]) -> None:
        """What the run makes, what every rule decides, and whether there is room for it."""
        for line in plan.summary():
            self.err(line + "\n")
        self._print_importance(plan)
        self._print_rules()
        for line in self._idle_options(plan):
            self.err(f"WARNING: {line}\n")
        for room in room_for((file.layout.path, file.layout.nbytes) for file in files):
            text = f"needs {size_text(room.needed)}, {size_text(room.free)} are free in {room.folder}"
            self.err(f"{INTERNAL}: {text}{'' if room.is_enough else '; this is not enough'}\n")

    def _print_importance(self, plan: Plan) -> None:
        if self.options.imatrix is None or self.options.repack:
            return
        text, warning = plan.importance()
        self.err(f"{INTERNAL}: {text}\n")
        if warning:
            self.err(f"WARNING: {warning}\n")

    def _print_rules(self) -> None:
        recipe = self.options.recipe
        if not recipe.rules:
            return
        if unused := self._rules_hindered():
            self.err(f"WARNING: custom rules have no effect with {unused}\n")
            return
        for line in recipe.report():
            self.err(f"{INTERNAL}: {line}\n")
        for line in recipe.warnings():
            self.err(f"WARNING: {line}\n")

    def _idle_options(self, plan: Plan) -> Iterator[str]:
        """What was asked for and changes nothing."""
        options = self.options
        hint = "" if self._rules_hindered() else "; --custom-q can name any tensor"
        for role in plan.idle_roles:
            yield f"{TypeOptions.option(role)} has no effect: it decides the type of no tensor{hint}"
        converted = {step.type for step in plan.steps if step.type != step.source_type}
        if options.symmetric_q4_0 and "q4_0" not in converted:
            yield "--symmetric-q40 has no effect: no tensor is converted to q4_0"
        if options.keep_split and len(self.file.shards) < 2:
            yield "--keep-split has no effect: the input is one file"
        if not converted and plan.problem is None and not options.repack and options.ftype is not None:
            yield "no tensor is converted: those that could be have their type already"

    def _rules_hindered(self) -> str:
        """What keeps custom rules from having an effect; "" if nothing does."""
        options = self.options
        ftype = options.ftype.name if options.ftype else "COPY"
        if options.repack or options.pure:
            return "--repack" if options.repack else "--pure"
        return f"type {ftype}" if ftype in ("COPY", "F32", "F16", "BF16", "BF16_R16") else ""

    def _print_sizes(self, plan: Plan) -> None:
        before = sum(step.source.nbytes for step in plan.steps if step.name != EXTRA_OUTPUT)
        self.err(f"{INTERNAL}: model size  = {before / MIB:8.2f} MB\n")
        self.err(f"{INTERNAL}: quant size  = {plan.nbytes / MIB:8.2f} MB\n")
        if plan.n_fallbacks:
            self.err(
                f"{INTERNAL}: WARNING: {plan.n_fallbacks} of {plan.n_convertible} tensor(s) "
                "required fallback quantization\n"
            )

    # writing

    def _write(self, files: list[OutputFile]) -> None:
        job = job_digest(self.file, files, symmetric_q4_0=self.options.symmetric_q4_0)
        output = ResumableOutput([file.layout for file in files], job)
        if output.open():
            self.err(
                f"{INTERNAL}: going on with the unfinished {output.paths[0]}: {output.n_done_bytes / MIB:.2f} of "
                f"{sum(file.layout.nbytes for file in files) / MIB:.2f} MiB are done\n"
            )
        try:
            _check_space(output)
            self._write_all(files, output)
            output.publish()
        except ResourceError as error:
            if again := _leave(output):
                raise ResourceError(f"{error}; make room and {again}") from error
            raise
        except IkpyError:
            output.discard()
            raise
        except KeyboardInterrupt:
            if output.is_published:
                hint = f" behind the last byte: {self.output} is complete"
            else:
                again = _leave(output)
                hint = f"; {again}" if again else " before anything was written"
            self.display.end()
            self.err(f"\n{INTERNAL}: interrupted{hint}\n")
            raise
        except Exception:  # no memory for a piece of rows, no more threads
            _leave(output)
            raise
        finally:
            self.display.end()

    def _write_all(self, files: list[OutputFile], output: ResumableOutput) -> None:
        work = [
            (index, step, place, output.resumed_bytes(index, place, step.nbytes))
            for index, file in enumerate(files)
            for step, place in zip(file.steps, tensor_places(file.layout, self.file.alignment), strict=True)
        ]
        skipped = sum(step.source.nbytes * skip // max(1, step.nbytes) for _, step, _, skip in work)
        total = sum(step.source.nbytes for _, step, _, _ in work)
        self.display.begin("quantizing", total, skipped)
        for index, step, place, skip in work:
            self._begin_line(step)
            if skip < step.nbytes:
                self._convert(output, index, step, skip)
            output.pad(index, place + _padded(step.nbytes, self.file.alignment))
            self._end_line(step)
            self.display.between_lines()

    def _convert(self, output: ResumableOutput, index: int, step: Step, skip: int) -> None:
        pieces = convert_rows(
            self.file.data(step.source),
            step.source_type,
            step.type,
            step.source.shape,
            name=step.name,
            imatrix=step.imatrix,
            n_threads=self.options.n_threads,
            symmetric_q4_0=self.options.symmetric_q4_0,
            skip=skip,
        )
        share = step.source.nbytes / step.nbytes
        done, released = skip, skip
        for piece in pieces:
            output.write(index, piece)
            self.display.advance(int(len(piece) * share))
            done += len(piece)
            if (done - released) * share >= RELEASED_BYTES:
                self.file.release(step.source, int(done * share))
                released = done
        self.file.release(step.source)


def _leave(output: ResumableOutput) -> str:
    """Stops in the middle; what can be done with what was written, "" if that is nothing."""
    if not output.n_done_bytes:
        output.discard()
        return ""
    output.keep()
    return f"run the same command again to go on, or delete {output.paths[0]}"


def _padded(nbytes: int, alignment: int) -> int:
    return nbytes + -nbytes % alignment


def _check_space(output: ResumableOutput) -> None:
    for room in room_for(output.missing_bytes()):
        if not room.is_enough:
            raise ResourceError(
                f"{output.target}: needs {size_text(room.needed)} more of disk space but only "
                f"{size_text(room.free)} are free in {room.folder}"
            )


def default_output(source: str, type_name: str, *, keep_split: bool) -> str:
    """Output name when none is given: ``ggml-model-TYPE.gguf`` next to the input."""
    return str(Path(source).parent / f"ggml-model-{type_name}{'' if keep_split else '.gguf'}")


def quantize(source: str, output: str, options: QuantizeOptions, *, out: Print, err: Print) -> Plan:
    """Quantize the model at ``source`` to ``output``; both may be the first of several shards.

    Raises UsageError, FileFormatError, UnsupportedError or ResourceError; an existing output stays as it was then.
    """
    refuse_without_imatrix(options)
    with GGUFFile.open(source, header_only=options.dry_run and not options.target.is_given) as file:
        return Quantizer(file, output, options, out=out, display=PlainDisplay(err)).run()


class Stopwatch:
    """Milliseconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def milliseconds(self) -> float:
        return (time.perf_counter() - self._start) * 1e3
