"""A Ray cluster that is told on its standard input, a line of JSON each time, what is to run; it never waits for calls.

Every line is a new version of the application, as each imperative deployment of Serve's is. Ends with its input.
"""

import json
import sys

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from webrtc_duplex.cluster.app import build


def main() -> None:
    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=80_000_000)
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=int(sys.argv[1])))
        for line in sys.stdin:
            target = serve.RunTarget(build(json.loads(line)), name="webrtc-duplex", route_prefix="/")
            serve.run_many([target], wait_for_applications_running=False)
            print("told", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
