"""`vlscope verify`: what it says of a sound checkpoint and of one that computes something else."""

from importlib.metadata import PackageNotFoundError

import pytest
import torch

import vlscope
from vlscope import cli, verify
from vlscope.verify import prompts, reference
from vlscope.verify.identities import ALL
from vlscope.verify.identities.identity import Broken, Identity


def test_a_sound_checkpoint_passes_with_every_value_compared(checkpoint, vlscope_model):
    report = verify.run(checkpoint("qwen2"))
    assert report.ok and not report.faults
    model = vlscope_model("qwen2")
    assert [held.sentence for held in report.identities] == [i.sentence for i in ALL if i.applies(model)]
    rows = {row.value: row for row in report.parity}
    assert rows["layers.*.layer_output"] == verify.Compared("layers.*.layer_output", bits=3 * len(prompts.CASES))
    assert rows["vision.video_features"].bits == 2
    assert rows["next_token_probs"].bits + rows["next_token_probs"].within == len(prompts.CASES)
    assert all(row.within == row.differ == 0 for row in report.parity if row.value != "next_token_probs")
    assert list(rows)[0] == "input_ids" and list(rows)[-1].startswith("every module's")
    assert "parity with transformers 5.17.0 on 8 prompts" in str(report)


def load_crooked(folder, attn_implementation, dtype=torch.float32, load=reference.load):
    """transformers' model with the last bits of one weight changed."""
    model = load(folder, attn_implementation, dtype)
    model.model.language_model.layers[1].mlp.up_proj.weight.mul_(1 + 1e-6)
    return model


def test_another_weight_fails_and_the_first_fault_is_where_it_is(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(reference, "load", load_crooked)
    monkeypatch.setattr(verify, "ALL", [])
    assert cli.main(["verify", str(checkpoint("qwen2"))]) == 1
    printed = capsys.readouterr().out
    first = printed[printed.index("in forward order:") :].splitlines()[1]
    assert "language_model.layers.1.mlp.up_proj.output differs in" in first
    assert printed.rstrip().endswith("more")


def test_a_broken_identity_is_told_and_the_exit_code_is_1(monkeypatch, capsys):
    def check(model, prompts):
        raise Broken("layers.0.input: differs")

    broken = Identity("text", "all is one", check, lambda model: True)
    monkeypatch.setattr(verify, "ALL", [broken, Identity("text", "not here", check, lambda model: False)])
    assert cli.main(["verify", "demo", "--without-parity"]) == 1
    printed = capsys.readouterr().out
    assert "text   all is one  layers.0.input: differs\n" in printed
    assert "0 identities hold, 1 do not" in printed and "not here" not in printed


@pytest.mark.parametrize(
    "release, note",
    [
        (None, "parity was not checked: transformers is not installed (pip install transformers==5.17.0)"),
        ("4.57.6", "parity with transformers 4.57.6 on 0 prompts; it is promised with 5.17.0"),
    ],
)
def test_a_missing_or_another_transformers_is_told(release, note, monkeypatch, capsys):
    def installed(name):
        if release is None:
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr(verify, "version", installed)
    monkeypatch.setattr(verify, "ALL", [])
    monkeypatch.setattr(prompts, "CASES", {})
    assert cli.main(["verify", "demo"]) == 0
    assert note in capsys.readouterr().out


def test_the_number_of_threads_is_as_it_was(monkeypatch):
    monkeypatch.setattr(verify, "ALL", [])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        verify.run("demo", parity=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, capsys):
    assert cli.main(["verify", str(tmp_path)]) == 2
    assert "is no checkpoint folder" in capsys.readouterr().err


def test_prompts_fit_a_vocabulary_that_lacks_the_usual_marks():
    config = {"model_type": "qwen2_5_vl", "text_config": {"vocab_size": 64}, "vision_config": {"tokens_per_second": 2}}
    config |= {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 151652}
    for inputs in vars(prompts.of(config)).values():
        assert inputs["input_ids"].max() < 64
    words = prompts.Spelling.of(config).words.tolist()
    assert words == [i for i in range(1, 64) if i not in (60, 61)]


def test_the_words_of_a_prompt_are_no_placeholders(vlscope_model):
    config = vlscope_model("demo").config
    marks = {config[f"{name}_token_id"] for name in ("image", "video", "vision_start", "vision_end")}
    ids = prompts.of(config).text["input_ids"]
    assert not marks & set(ids.flatten().tolist())
    assert isinstance(vlscope.load("demo", dispatch=False)(**prompts.of(config).text).logits, torch.Tensor)
