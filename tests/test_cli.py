"""The command line: what each command prints, which mistakes it refuses and with which exit code."""

import importlib
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

import vlscope
from vlscope import cli, demo

QUESTION = "What color is the square?"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder that commands run in, with pictures of squares."""
    for color in ("red", "blue", "green"):
        demo.picture(color).save(tmp_path / f"{color}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys):
    """run(*arguments): the exit code, stdout and stderr of a command."""

    def call(*arguments):
        capsys.readouterr()
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as exit:  # argparse's way
            code = exit.code
        return (code, *capsys.readouterr())

    return call


def asked(command, *more):
    return (command, "demo", "--prompt", QUESTION, "--image", "red.png", *more)


def rows(text):
    """The table at the start of `text`: first cell -> the others."""
    cells = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {first: rest for first, *rest in cells}


# --- help -------------------------------------------------------------------------------------------------------


def test_the_help_lists_every_command(run):
    code, out, _ = run("--help")
    assert code == 0
    for name in cli.COMMANDS:
        summary = importlib.import_module(f"vlscope.commands.{name}").__doc__.partition("\n")[0].rstrip(".")
        assert re.search(rf"^    {name}\s+{re.escape(summary)}$", out, re.M), name
    assert "exit codes: 0 done, 1 a check failed, 2 a mistake" in out


def examples(name):
    """The examples at the end of a command's help, as arguments."""
    text = importlib.import_module(f"vlscope.commands.{name}").__doc__.partition("\nExamples:\n")[2]
    lines = text.replace("\\\n", " ").strip().splitlines()
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_ends_with_examples_of_it(name, run):
    code, out, _ = run(name, "--help")
    assert code == 0 and "examples:\n  vlscope " in out
    assert examples(name) and all(f"vlscope {name}" in " ".join(example) for example in examples(name))


QUICK = [name for name in cli.COMMANDS if name not in ("demo", "verify", "collect")]  # these have tests of their own


@pytest.mark.parametrize(
    "example",
    [example for name in QUICK for example in examples(name) if not re.search("checkpoint|Qwen/", " ".join(example))],
    ids=" ".join,
)
def test_the_examples_of_the_help_run(example, run):
    code, out, error = run(*example[1:])
    assert (code, error) == (0, "") and out


# --- what commands do -------------------------------------------------------------------------------------------


def test_values_prints_the_model(run, vlscope_model):
    assert run("values", "demo") == (0, f"{vlscope_model('demo')!r}\n", "")


def test_run_prints_what_comes_next(run, vlscope_model):
    code, out, _ = run(*asked("run", "--max-new-tokens", 5))
    model = vlscope_model("demo")
    inputs = model.encode(QUESTION, images=["red.png"])
    with model.trace(**inputs):
        probability, token = model.next_token_probs[0].max(-1)
    first = out.splitlines()[:2]
    assert code == 0 and first[0] == f"{inputs['input_ids'].shape[1]} tokens; the next one is"
    assert first[1].split() == [repr(model.tokenizer.decode([int(token)])), f"{float(probability):.3f}"]
    assert f"\nanswer\n  {model.generate(**inputs, max_new_tokens=5).text}\n" in out


def test_run_saves_the_values_of_a_trace(run, vlscope_model):
    sites = ("vision.image_features", "layers.*.layer_output", "layers.-1.self_attn.attention_probabilities")
    code, out, _ = run(*asked("run", "--save", *sites, "-o", "out.safetensors", "--attention", "eager"))
    assert code == 0 and "out.safetensors: 8 tensors, " in out
    model = vlscope_model("demo", "eager")
    with safe_open("out.safetensors", "pt") as file, model.trace(QUESTION, images=["red.png"]):
        assert file.metadata() == {"prompt": QUESTION, "model": "demo"}
        names = vlscope.sites.expand(model, sites)
        assert sorted(file.keys()) == sorted(names)
        for name in names:
            value = model.get(name)
            assert torch.equal(file.get_tensor(name), value)
            assert rows(out)[name] == [str(list(value.shape)), "float32"]


def test_run_saves_the_parts_of_a_value_with_one_for_each_image(run, vlscope_model):
    site = "vision.layers.0.self_attn.image_attention_probabilities"
    code, out, _ = run(*asked("run", "blue.png", "--save", site, "-o", "out.safetensors"))
    model = vlscope_model("demo")
    with safe_open("out.safetensors", "pt") as file, model.trace(QUESTION, images=["red.png", "blue.png"]):
        patterns = model.get(site)
        assert sorted(file.keys()) == [f"{site}.0", f"{site}.1"]
        assert torch.equal(file.get_tensor(f"{site}.1"), patterns[1])


def test_patch_prints_the_cells_of_a_sweep(run, vlscope_model):
    model = vlscope_model("demo")
    code, out, _ = run(*asked("patch", "--donor-image", "blue.png", "--columns", "each"))
    here, donor = (model.encode(QUESTION, images=[f"{color}.png"]) for color in ("red", "blue"))
    cells = vlscope.patching.sweep(model, donor, here, "layer_input", metric=("Blue", "Red"))
    assert code == 0 and out.startswith("logit of 'Blue' minus logit of 'Red': ")
    assert f"{cells.corrupted:.2f} here, {cells.clean:.2f} in the donor" in out
    printed = [row for row in re.findall(r"^layers\.2\.layer_input(.*)$", out, re.M)]
    shares = [float(cell) for row in printed for cell in row.split()]
    assert shares == pytest.approx(cells.recovered[2].tolist(), abs=6e-4)


def test_patch_moves_the_answer_by_the_image_tokens_only(run):
    code, out, _ = run(*asked("patch", "--donor-image", "blue.png"))
    image, other, last = map(float, rows(out)["layers.0.layer_input"])
    assert code == 0 and image > 0.2 and other == last == 0


def test_ablate_prints_the_answer_without_each_pathway(run, vlscope_model):
    code, out, _ = run(*asked("ablate"))
    model, found = vlscope_model("demo"), rows(out)
    assert code == 0 and list(found) == [
        "zeroed",
        "nothing",
        "vision.image_features",
        "layers.*.deepstack_output",
        "all of these",
    ]
    with model.trace(QUESTION, images=["red.png"]):
        model.vision.image_features[:] = 0
        for layer in model.layers[:3]:
            layer.deepstack_output[:] = 0
        probability, token = model.next_token_probs[0].max(-1)
    answer = model.tokenizer.decode([int(token)])
    assert found["all of these"][:2] == [answer, f"{float(probability):.3f}"]
    assert found["nothing"][0] == "Red" != answer


def test_ablate_leaves_out_a_pathway_that_a_family_lacks(run, checkpoint):
    code, out, _ = run("ablate", checkpoint("qwen2"), "--prompt", QUESTION, "--image", "red.png")
    assert code == 0 and list(rows(out)) == ["zeroed", "nothing", "vision.image_features"]


def test_ablate_by_the_mean_of_other_images_puts_their_mean_there(run, vlscope_model):
    code, out, _ = run(*asked("ablate", "--site", "image_features", "--by", "mean", "--over", "blue.png", "green.png"))
    model, means = vlscope_model("demo"), []
    for color in ("blue", "green"):
        with model.trace(QUESTION, images=[f"{color}.png"]):
            means.append(model.vision.image_features.mean(0))
    with model.trace(QUESTION, images=["red.png"]):
        model.vision.image_features[:] = torch.stack(means).mean(0)
        probability, token = model.next_token_probs[0].max(-1)
    expected = [model.tokenizer.decode([int(token)]), f"{float(probability):.3f}"]
    assert code == 0 and rows(out)["vision.image_features"][:2] == expected


# --- mistakes ---------------------------------------------------------------------------------------------------

REFUSED = {
    "a file for nothing": (
        asked("run", "-o", "x.safetensors"),
        "nothing to write to x.safetensors: give sites by --save",
    ),
    "a folder that is none": (
        asked("run", "--save", "logits", "-o", "no/x"),
        "no is no folder, so x cannot be written",
    ),
    "an unknown site": (asked("run", "--save", "layer.0"), "no site 'layer.0'.*Did you mean layers"),
    "a block too many": (asked("run", "--save", "layers.9.input"), "index 9, and there are 6 blocks"),
    "a site that is no tensor": (asked("run", "--save", "layers.0.self_attn.output"), "is a tuple and no tensor"),
    "a value without its image": (
        ("run", "demo", "--prompt", "a", "--save", "vision.image_features"),
        "no image in this",
    ),
    "an image that is not there": (("run", "demo", "--prompt", "a", "--image", "no.png"), "no image file 'no.png'"),
    "a file that is no image": (("run", "demo", "--prompt", "a", "--image", __file__), "in no image format"),
    "an empty prompt": (("run", "demo", "--prompt", ""), "the prompt is empty"),
    "a model that is not there": (("run", "no", "--prompt", "a"), "no does not exist: give the folder of a checkpoint"),
    "a folder without a model": (("values", "."), "is no checkpoint folder"),
    "a dtype that is none": (asked("run", "--dtype", "int8"), "dtype is 'int8'; give a floating-point dtype"),
    "no donor": (asked("patch"), "give a donor that differs"),
    "the same answer": (asked("patch", "--donor-image", "red.png"), "both runs answer 'Red': give the two answers"),
    "prompts of two lengths": (
        ("patch", "demo", "--prompt", "One", "--donor-prompt", "The day after"),
        "the clean prompt has 3 tokens and the corrupted one 1",
    ),
    "a metric of many tokens": (
        asked("patch", "--donor-image", "blue.png", "--metric", "zzzqq", "a"),
        "takes single tokens",
    ),
    "an axis that is none": (asked("patch", "--donor-image", "blue.png", "--axis", "no"), "none of 'no'"),
    "a picture of no format": (
        asked("patch", "--donor-image", "blue.png", "--picture", "x.no"),
        "no format of pictures",
    ),
    "a picture in no folder": (asked("patch", "--donor-image", "blue.png", "--picture", "no/x.png"), "no is no folder"),
    "a patch of what is read-only": (
        asked("patch", "--donor-image", "blue.png", "--site", "next_token_probs"),
        "next_token_probs is read-only: .*assign model.logits",
    ),
    "an ablation of what is read-only": (asked("ablate", "--site", "vision.image_token_mask"), "is read-only: "),
    "an ablation of no image": (("ablate", "demo", "--prompt", "a"), "give one by --image, or other sites by --site"),
    "images of no mean": (asked("ablate", "--over", "blue.png"), "it goes with --by mean"),
    "an unknown size": (("shape", "--height", 9, "--width", 9, "--model", "9b"), "no size that is known"),
    "a huge image": (("shape", "--height", 10**30, "--width", 9), "no image has so much"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, run):
    code, out, error = run(*arguments)
    assert code == cli.USER_ERROR == 2
    assert re.fullmatch(f"vlscope: .*{message}.*\n", error)
    assert not out, "refused before anything is computed"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "the following arguments are required: COMMAND"),
        (("no",), "invalid choice: 'no'"),
        (("run", "demo"), "the following arguments are required: --prompt"),
        (("run", "demo", "--prompt", "a", "--max-new-tokens", "0"), "'0' is no number of 1 or more"),
        (("run", "demo", "--prompt", "a", "--max-new-tokens", "-1"), "'-1' is no number of 1 or more"),
        (("shape", "--height", "9.5", "--width", "9"), "invalid int value: '9.5'"),
    ],
)
def test_what_cannot_be_parsed_shows_the_usage_and_exit_code_2(arguments, message, run):
    code, out, error = run(*arguments)
    assert code == 2 and not out and error.startswith("usage: vlscope") and message in error


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch):
    def fail(arguments):
        raise ZeroDivisionError

    monkeypatch.setattr("vlscope.commands.values.run", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["values", "demo"])


def test_ctrl_c_ends_with_130(monkeypatch):
    def stop(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("vlscope.commands.values.run", stop)
    assert cli.main(["values", "demo"]) == 130


# --- as a program -----------------------------------------------------------------------------------------------


def test_the_module_runs_as_a_program_and_a_closed_pipe_is_no_traceback():
    """`vlscope values demo | head -1`."""
    command = f"{shlex.quote(sys.executable)} -m vlscope values demo | head -c 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=dict(os.environ))
    assert result.stderr == "" and len(result.stdout) == 1
    assert result.returncode in (0, 141)  # the whole output may fit into the pipe
