#!/usr/bin/env bash
# A Ray cluster on this one machine: a head without CPUs and worker nodes, each with its own raylet. See cluster/README.md.
set -euo pipefail

readonly dir=${RAYSIM_CLUSTER_DIR:-/tmp/raysim-cluster}
readonly head_port=${RAYSIM_HEAD_PORT:-6379}
readonly dashboard_port=${RAYSIM_DASHBOARD_PORT:-8265}
readonly workers=${RAYSIM_WORKERS:-2}
readonly worker_cpus=${RAYSIM_WORKER_CPUS:-1}
readonly object_store_mb=${RAYSIM_OBJECT_STORE_MB:-300}
readonly start_timeout_s=${RAYSIM_START_TIMEOUT_S:-120}
readonly stop_timeout_s=${RAYSIM_STOP_TIMEOUT_S:-20}
readonly pids=$dir/pids # One line per node: name, process id, start time of that process.
readonly url=http://127.0.0.1:$dashboard_port

usage() {
  cat <<USAGE
usage: cluster/local.sh start|stop|status

A Ray cluster on this machine. Environment, with what is used now:
  RAYSIM_CLUSTER_DIR=$dir   logs, sockets and process ids
  RAYSIM_HEAD_PORT=$head_port
  RAYSIM_DASHBOARD_PORT=$dashboard_port
  RAYSIM_WORKERS=$workers
  RAYSIM_WORKER_CPUS=$worker_cpus   of each worker
  RAYSIM_OBJECT_STORE_MB=$object_store_mb   of each node
  RAYSIM_START_TIMEOUT_S=$start_timeout_s
  RAYSIM_STOP_TIMEOUT_S=$stop_timeout_s   before what is left is killed
USAGE
}

die() {
  echo "local.sh: $*" >&2
  exit 1
}

# When a process started, in clock ticks since boot: with its id it names a process for good. Nothing if it has ended.
start_time() {
  local stat
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
  # The name, second field, may hold anything; state Z: dead, waiting to be collected.
  read -ra stat <<<"${stat##*) }"
  [[ ${stat[0]} == Z ]] || echo "${stat[19]}"
}

is_alive() { # PID START_TIME
  [[ -n $2 && $(start_time "$1") == "$2" ]]
}

# "NAME PID START_TIME" of the recorded nodes that are alive.
alive_nodes() {
  local name pid started
  [[ -e $pids ]] || return 0
  while read -r name pid started; do
    if is_alive "$pid" "$started"; then echo "$name $pid $started"; fi
  done <"$pids"
}

# "PID START_TIME KIND" of the nodes' processes: their sessions and all descendants; KIND is `job` for the driver of a
# submitted job, which has one of its own, else `node`.
members() { # ROOT_PID...
  local pid kind
  ps -eo pid=,ppid=,sid= | awk -v roots="$*" '
    BEGIN { n = split(roots, list, " "); for (i = 1; i <= n; i++) root[list[i]] = 1 }
    { parent[$1] = $2; session[$1] = $3; if ($1 in root || $3 in root) ours[$1] = 1 }
    END {
      do {
        grown = 0
        for (pid in parent) if (!(pid in ours) && parent[pid] in ours) { ours[pid] = 1; grown = 1 }
      } while (grown)
      for (pid in ours) print pid, (session[pid] in root ? "node" : "job")
    }' | while read -r pid kind; do echo "$pid $(start_time "$pid") $kind"; done
}

check_settings() {
  local name
  for name in RAYSIM_HEAD_PORT=$head_port RAYSIM_DASHBOARD_PORT=$dashboard_port RAYSIM_WORKERS=$workers \
    RAYSIM_WORKER_CPUS=$worker_cpus RAYSIM_OBJECT_STORE_MB=$object_store_mb \
    RAYSIM_START_TIMEOUT_S=$start_timeout_s RAYSIM_STOP_TIMEOUT_S=$stop_timeout_s; do
    [[ ${name#*=} =~ ^[1-9][0-9]*$ ]] || die "${name%%=*} should be a positive whole number, got '${name#*=}'"
  done
  [[ $dir == /* && $dir != *[[:space:]]* ]] || die "RAYSIM_CLUSTER_DIR should be an absolute path without spaces, got '$dir'"
  # Sockets lie in NODE/session_DATE_TIME_PID/sockets, and the system allows their paths 107 characters.
  ((${#dir} <= 38)) || die "RAYSIM_CLUSTER_DIR: '$dir' has ${#dir} characters, Ray's socket paths leave room for 38"
  ((object_store_mb >= 75)) || die "RAYSIM_OBJECT_STORE_MB should be at least 75, which Ray demands, got $object_store_mb"
  [[ -d /proc/self ]] || die "needs Linux"
  for name in ray python3 setsid ps awk; do
    command -v "$name" >/dev/null || die "no '$name' on the PATH; activate the environment that raysim is installed in"
  done
}

# Fails when one of our ports is taken; prints a free one for the Ray Client server, which `ray start` insists on.
check_ports() {
  python3 - "RAYSIM_HEAD_PORT=$head_port" "RAYSIM_DASHBOARD_PORT=$dashboard_port" <<'PYTHON'
import socket
import sys


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


ports = {name: int(port) for name, _, port in (setting.partition("=") for setting in sys.argv[1:])}
for name, port in ports.items():
    if not 1024 <= port <= 65535:
        sys.exit(f"local.sh: {name} should be between 1024 and 65535, got {port}")
    if not is_free(port):
        sys.exit(f"local.sh: port {port} is in use by another program; choose a free one with {name}=...")
if len(set(ports.values())) < len(ports):
    sys.exit(f"local.sh: {' and '.join(ports)} are the same port")
print(next(port for port in range(10001, 32768) if port not in ports.values() and is_free(port)))
PYTHON
}

launch() { # NAME OPTION...
  local name=$1 pid
  shift
  # Told to end, a node waits this long for its work; a job is told as well, so this is enough.
  RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=${RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S:-5}
  export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  # A folder per node: in a common one, each node would unpack a job's files over those of the others.
  setsid ray start --block --log-color=false --disable-usage-stats --temp-dir="$dir/$name" \
    --num-gpus=0 --memory="$memory" --object-store-memory=$((object_store_mb * 1024 * 1024)) \
    --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0 "$@" \
    </dev/null >"$dir/$name.log" 2>&1 &
  pid=$!
  echo "$name $pid $(start_time "$pid")" >>"$pids"
}

# Wait until every recorded node says that it has started; the time counts from the beginning of the script.
await_started() {
  local name pid started waiting=1
  while ((waiting)); do
    waiting=0
    while read -r name pid started; do
      grep -q 'Ray runtime started' "$dir/$name.log" && continue
      waiting=1
      is_alive "$pid" "$started" || fail_with_log "$name ended before it had started" "$name"
      ((SECONDS < start_timeout_s)) || fail_with_log "$name did not start within $start_timeout_s s" "$name"
    done <"$pids"
    ((!waiting)) || sleep 0.3
  done
}

fail_with_log() { # MESSAGE NAME
  {
    echo "local.sh: $1; the end of $dir/$2.log:"
    tail -n 15 "$dir/$2.log" | sed 's/^/  /'
  } >&2
  exit 1
}

# Lists the nodes; fails when fewer than NODES are alive after SECONDS.
list_nodes() { # NODES SECONDS
  env -u RAY_ADDRESS -u RAY_API_SERVER_ADDRESS python3 - "$url" "$@" <<'PYTHON'
import sys
import time

from ray.util.state import list_nodes

url, wanted, limit = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
deadline = time.monotonic() + limit
while True:
    try:
        nodes, problem = list_nodes(address=url, filters=[("state", "=", "ALIVE")], timeout=5), ""
    except Exception as error:  # Not up yet, or not ours.
        nodes, problem = [], f": {error}"
    if len(nodes) >= wanted or time.monotonic() > deadline:
        break
    time.sleep(0.5)
for node in sorted(nodes, key=lambda node: not node.is_head_node):
    cpus = (node.resources_total or {}).get("CPU", 0)
    print(f"  {'head' if node.is_head_node else 'worker':6}  {node.node_id}  {cpus:g} CPUs")
if len(nodes) < wanted:
    sys.exit(f"local.sh: {len(nodes)} of {wanted} nodes are alive after {limit:g} s{problem}")
PYTHON
}

# Whether clients need a token. `ray start --head` demands one by itself when the user has one; nothing else in Ray follows.
authentication() {
  if [[ -n ${RAY_AUTH_MODE:-} ]]; then
    echo "$RAY_AUTH_MODE"
  elif grep -q 'Token authentication is enabled' "$dir/head.log"; then
    echo token
  else
    echo disabled
  fi
}

start() {
  local client_port address prefix='' i
  check_settings
  [[ -z $(alive_nodes) ]] || die "a cluster in $dir is running already; 'cluster/local.sh stop' ends it"
  client_port=$(check_ports)
  mkdir -p "$dir"
  : >"$pids"
  # Each raylet would offer all of the machine's memory.
  memory=$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo)
  memory=$((memory * 1024 * 7 / 10 / (workers + 1)))

  trap 'echo "local.sh: not started, ending what has been" >&2; end_all' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  echo "starting a head and $workers workers, logs in $dir"
  launch head --head --port="$head_port" --dashboard-host=127.0.0.1 --dashboard-port="$dashboard_port" \
    --ray-client-server-port="$client_port" --num-cpus=0
  await_started
  RAY_AUTH_MODE=$(authentication)
  export RAY_AUTH_MODE
  for ((i = 1; i <= workers; i++)); do
    launch "w$i" --address="127.0.0.1:$head_port" --num-cpus="$worker_cpus"
  done
  await_started
  list_nodes $((workers + 1)) $((start_timeout_s > SECONDS ? start_timeout_s - SECONDS : 1))
  trap - EXIT INT TERM

  address=$(cat "$dir/head/ray_current_cluster")
  [[ $RAY_AUTH_MODE != token ]] || prefix='RAY_AUTH_MODE=token '
  cat <<SUMMARY
ready after $SECONDS s
  dashboard             $url
  ray address           $address
  token authentication  $RAY_AUTH_MODE
run something on it, from the folder that holds configs/:
  ${prefix}ray job submit --address $url --working-dir . -- raysim run configs/quickstart.yaml output.dir=\$PWD/runs
SUMMARY
}

# End the nodes that were started here, with all their processes: TERM, then KILL for what is left after a while.
end_all() {
  local name pid started roots=() processes left
  # Also the session of a node that has died, unless its number belongs to another process by now.
  while read -r name pid started; do
    if is_alive "$pid" "$started" || [[ ! -e /proc/$pid ]]; then roots+=("$pid"); fi
  done <"$pids"
  processes=$(members "${roots[@]}")
  signal TERM "$(grep job <<<"$processes")"
  signal TERM "$(alive_nodes | cut -d ' ' -f 2-)"
  await_ended "$processes" "$stop_timeout_s"
  processes+=$'\n'$(members "${roots[@]}") # What has been begun in the meantime, too.
  signal KILL "$processes"
  await_ended "$processes" 5
  left=$(still_alive "$processes")
  [[ -z $left ]] || die "these processes do not end: ${left//$'\n'/ }"
  rm -f "$pids"
}

# These take lines of "PID START_TIME ...", as `members` prints them.
still_alive() { # LINES
  local pid started
  while read -r pid started _; do
    if [[ -n $pid ]] && is_alive "$pid" "$started"; then echo "$pid"; fi
  done <<<"$1"
}

signal() { # NAME LINES
  local pid
  for pid in $(still_alive "$2"); do
    kill "-$1" "$pid" 2>/dev/null || true
  done
}

await_ended() { # LINES SECONDS
  local deadline=$((SECONDS + $2))
  while ((SECONDS < deadline)) && [[ -n $(still_alive "$1") ]]; do sleep 0.3; done
}

stop() {
  local count
  check_settings
  if [[ ! -e $pids ]]; then
    echo "no cluster was started in $dir"
    return
  fi
  count=$(alive_nodes | wc -l)
  end_all
  echo "stopped $count nodes in $SECONDS s; their logs are still in $dir"
}

status() {
  local name pid started running=0 ended=0
  check_settings
  [[ -e $pids ]] || die "no cluster was started in $dir"
  while read -r name pid started; do
    if is_alive "$pid" "$started"; then
      echo "$name: process $pid"
      running=$((running + 1))
    else
      echo "$name: ended, see $dir/$name.log"
      ended=$((ended + 1))
    fi
  done <"$pids"
  ((running)) || die "no node is running"
  RAY_AUTH_MODE=$(authentication)
  export RAY_AUTH_MODE
  list_nodes "$running" 5
  ((!ended)) || die "$ended of $((running + ended)) nodes have ended"
  echo "  dashboard $url, ray address $(cat "$dir/head/ray_current_cluster")"
}

case ${1:-} in
  start | stop | status) "$1" ;;
  -h | --help | help) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac
