"""What cannot be loaded on one of two machines, while the other is busy with it: see test_stage.py."""

import os
import time

if os.environ["RANK"] == "1":
    raise ValueError("not today")
time.sleep(60.0)
