"""Train, index and serve a run, then ask the service over HTTP, as another program would. Needs the extra `serve`."""

import json
import subprocess
import sys
import urllib.request

import sparring
from sparring.data import make_world
from sparring.serving import build_index

data = make_world(queries=400, items=200, seed=0).interactions
split = sparring.split(data, "random", valid=0.1, test=0.2, seed=0)
run = sparring.build("quick", split.train, {"dim": 16, "epochs": 2})
sparring.fit(run, split, "runs/served", device="cpu", overwrite=True)
index = build_index(sparring.load("runs/served"), k=10).index
print(index)

# `sparring serve runs/served`; its log is one JSON object per line on stderr
command = [sys.executable, "-m", "sparring", "serve", "runs/served", "--port", "0"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
    try:
        address = next(line["url"] for line in map(json.loads, service.stderr) if "url" in line)
        question = {"user": int(data.query_ids.ids[0]), "k": 3}
        request = urllib.request.Request(
            f"{address}v1/recommend", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            print(json.dumps(json.load(answer), indent=2))
    finally:
        service.terminate()
