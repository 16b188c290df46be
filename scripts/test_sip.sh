#!/usr/bin/env bash
# Telephone calls end to end: baresip -> Janus -> bridge -> server, and baresip -> server directly.
#
#   scripts/test_sip.sh [--install] [options of pytest]
#
# Needs root (it makes a network namespace and ends it), janus and baresip-core from Debian.
set -euo pipefail
source "$(dirname "$0")/environment.sh"

arguments=()
for argument; do
    if [ "$argument" = --install ]; then may_install=true; else arguments+=("$argument"); fi
done
need janus janus
need baresip baresip-core
need ip iproute2
make_environment test,check

namespace=duplex-sip-$$
address=10.77.0.1
ip netns add "$namespace"
trap 'ip netns delete "$namespace"' EXIT
# Media libraries ignore loopback addresses, so the namespace gets one end of a cable; the other end leads nowhere.
ip -n "$namespace" link add phones type veth peer name nowhere
ip -n "$namespace" address add "$address/24" dev phones
for link in lo phones nowhere; do ip -n "$namespace" link set "$link" up; done

cd "$root"
WEBRTC_DUPLEX_SIP_ADDRESS=$address ip netns exec "$namespace" "$python" -m pytest -m sip tests/test_sip.py "${arguments[@]}"
