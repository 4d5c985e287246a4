"""Nothing in a step reads a value of the device on the host: each read would wait for the device."""

import json
import subprocess
import sys
from pathlib import Path


def test_no_value_is_read_on_the_host():
    program = Path(__file__).with_name("on_device.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    seen = {name: found.pop(name) for name in [*found] if name.startswith("seen")}
    assert len(seen) == 7
    assert all(seen.values())  # .item(), .tolist(), ... would have been noticed
    assert len(found) == 8
    for name, result in found.items():
        assert result["reads"] == [], name
        assert result["equal"], name  # forward and backward, with the CPU's values
        assert len(result["kernels"]) == 2, name
