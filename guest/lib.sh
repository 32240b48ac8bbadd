# shellcheck shell=dash
# What the guest's scripts share: named steps, waiting for events, asking the host, connecting.
# In:  OCTOKV_PORT and OCTOKV_NQN, the target as the host started it; OCTOKV_HOST (default 1) tells one guest's
#      host name from another's; /data holds what the host gave along.
# Out: one "step:" line per step; the first failing assertion prints the step and ends the script with 1.

host_address=10.0.2.2
host_id=6f63746f-6b76-4b65-a0e1-00000000000${OCTOKV_HOST:-1}
host_nqn=nqn.2014-08.org.nvmexpress:uuid:$host_id

step() {
    echo "$*" >/run/step
    echo "step: $*"
}

fail() {
    echo "guest: FAILED at step \"$(cat /run/step)\": $*"
    for file in /tmp/out /tmp/err; do
        [ -s $file ] && { echo "guest: $file begins:"; head -c 1500 $file | tr -c ' -~\n' '.'; echo; }
    done
    exit 1
}

# run COMMAND...: it must succeed; its output in /tmp/out, its messages in /tmp/err.
run() { "$@" >/tmp/out 2>/tmp/err || fail "\"$*\" failed"; }

# says TEXT: the last command's output has a line that matches this extended regular expression.
says() { grep -Eq -- "$1" /tmp/out || fail "the output has no line like \"$1\""; }

# Tries a command up to 400 times, 50 ms apart, until it holds: the kernel scans namespaces in the background.
await() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 400 ] || return 1
        usleep 50000
    done
}

# ask WORD...: the host does something, and answers when it is done; what it says is left in $answer.
ask() {
    echo "$*" >&4
    answer=
    read -r -t 120 answer <&4 || fail "the host did not answer \"$*\""
    case $answer in
        done*) answer=${answer#done}; answer=${answer# } ;;
        *) fail "the host could not do \"$*\": $answer" ;;
    esac
}
[ ! -c /dev/ttyS1 ] || exec 4<>/dev/ttyS1

namespace_device() { ls /dev/ng*n1 >/dev/null 2>&1; }
no_namespace_device() { ! namespace_device; }

discover() {
    nvme discover -t tcp -a $host_address -s "$OCTOKV_PORT" -q $host_nqn -I $host_id "$@" >/tmp/out 2>/tmp/err
}

# try_connect [nvme-cli options]
try_connect() {
    nvme connect -t tcp -a $host_address -s "$OCTOKV_PORT" -n "$OCTOKV_NQN" -q $host_nqn -I $host_id "$@" \
        >/tmp/out 2>/tmp/err
}

# connect [nvme-cli options]: leaves the character device of namespace 1 in $device.
connect() {
    try_connect "$@" || fail "nvme connect $* was refused"
    await namespace_device || fail "no /dev/ngXn1 appeared within 20 s"
    device=$(ls /dev/ng*n1)
    [ -c "$device" ] || fail "not exactly one character device: $device"
}

disconnect() {
    nvme disconnect -n "$OCTOKV_NQN" >/tmp/out 2>/tmp/err || fail "nvme disconnect was refused"
    grep -q 'disconnected 1 ' /tmp/out || fail "nvme disconnect did not disconnect one controller"
    await no_namespace_device || fail "the device stayed 20 s after the disconnect"
}

# The namespace's disk, in $disk; the kernel numbers disks as it likes.
disk_of() {
    for node in /sys/block/nvme*; do
        disk=/dev/${node##*/}
        [ -b "$disk" ] && [ "$(cat "$node/nsid" 2>/dev/null)" = "$1" ] && return 0
    done
    return 1
}

# result NAME COMMAND...: whatever becomes of it, the next one runs.
result() {
    name=$1
    shift
    echo "$name" >/run/step
    echo "result: $name begin"
    status=0
    "$@" 2>/tmp/err || status=$?
    [ $status = 0 ] || cat /tmp/err
    echo "result: $name end $status"
}
