"""Pages in headless Chromium: what their scripts made of them, and what they look like."""

import shutil
import subprocess
import tempfile
from urllib.parse import quote

import pytest

SECONDS = 120


def _run(address, *options):
    """Chromium's output on a page, with a profile of its own that is gone afterwards."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed; ./dev test installs it")
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        # Chromium's helpers may outlive it by a moment and hold the pipe of its errors open.
        result = subprocess.run(
            [*command, *options, address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=SECONDS
        )
    assert result.returncode == 0, f"chromium ended with {result.returncode}"
    return result.stdout.decode()


def address(page, fragment=""):
    """The file: address of a page, with what stands behind its `#`."""
    return page.resolve().as_uri() + (f"#{quote(fragment, safe='=&')}" if fragment else "")


def document(page, fragment=""):
    """The text of a page after its scripts have run."""
    return _run(address(page, fragment), "--dump-dom")


def screenshot(page, path, fragment="", size=(1000, 900)):
    """Writes a PNG of a page as it is shown in a window of `size`."""
    _run(address(page, fragment), f"--screenshot={path}", f"--window-size={size[0]},{size[1]}", "--hide-scrollbars")
