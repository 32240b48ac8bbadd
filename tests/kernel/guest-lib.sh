# shellcheck shell=dash
# What the guest's scripts share: named steps, connecting, and one function per Key Value command.
# In:  OCTOKV_PORT and OCTOKV_NQN, the target as the host started it; /data holds the values the host made.
# Out: one "step:" line per step; the first failing assertion prints the step and ends the script with 1.
# Commands go through `nvme io-passthru` on the generic character device, as a user without SPDK would send them.

host_address=10.0.2.2
host_nqn=nqn.2014-08.org.nvmexpress:uuid:6f63746f-6b76-4b65-a0e1-000000000001
host_id=6f63746f-6b76-4b65-a0e1-000000000001

step() {
    echo "$*" >/run/step
    echo "step: $*"
}

fail() {
    echo "guest: FAILED at step \"$(cat /run/step)\": $*"
    for file in /tmp/out /tmp/err; do
        [ -s $file ] && { echo "guest: $file begins:"; head -c 600 $file | tr -c '[:print:]\n' '.'; echo; }
    done
    exit 1
}

# Tries a command up to 200 times, 50 ms apart, until it holds: the kernel scans namespaces in the background.
await() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 200 ] || return 1
        usleep 50000
    done
}

namespace_device() { ls /dev/ng*n1 >/dev/null 2>&1; }
no_namespace_device() { ! namespace_device; }

discover() {
    nvme discover -t tcp -a $host_address -s "$OCTOKV_PORT" -q $host_nqn -I $host_id >/tmp/out 2>/tmp/err
}

# connect [nvme-cli options]: leaves the character device's name in $device.
connect() {
    nvme connect -t tcp -a $host_address -s "$OCTOKV_PORT" -n "$OCTOKV_NQN" -q $host_nqn -I $host_id "$@" \
        >/tmp/out 2>/tmp/err || fail "nvme connect $* was refused"
    await namespace_device || fail "no /dev/ngXn1 appeared within 10 s"
    device=$(ls /dev/ng*n1)
    [ -c "$device" ] || fail "not exactly one character device: $device"
}

disconnect() {
    nvme disconnect -n "$OCTOKV_NQN" >/tmp/out 2>/tmp/err || fail "nvme disconnect was refused"
    grep -q 'disconnected 1 ' /tmp/out || fail "nvme disconnect did not disconnect one controller"
    await no_namespace_device || fail "the device stayed 10 s after the disconnect"
}

# key_fields KEY: the key (1 to 16 bytes) as the four command dwords that carry it.
key_fields() {
    printf %s "$1" | od -An -v -tx1 | awk '
        { for (i = 1; i <= NF; i++) byte[n++] = $i }
        END {
            split("2 3 14 15", name, " ")
            for (d = 0; d < 4; d++) {
                word = ""
                for (i = 3; i >= 0; i--) word = word ((4 * d + i) in byte ? byte[4 * d + i] : "00")
                printf "--cdw%s=0x%s ", name[d + 1], word
            }
        }'
}

# passthru OPCODE KEY OPTIONS...: one command on namespace 1; its output in /tmp/out, its messages in /tmp/err.
passthru() {
    opcode=$1
    key=$2
    shift 2
    # shellcheck disable=SC2046 # The fields are words by intention.
    nvme io-passthru "$device" -o "$opcode" -n 1 $(key_fields "$key") "$@" >/tmp/out 2>/tmp/err
}

# store KEY FILE [OPTION BITS]: bit 0 update only, bit 1 add only.
store() {
    size=$(stat -c %s "$2")
    passthru 0x01 "$1" --write -l "$size" -i "$2" --cdw10="$size" --cdw11=$((${#1} | (${3:-0} << 8)))
}

# retrieve KEY BYTES: the value in /tmp/out.
retrieve() { passthru 0x02 "$1" --read -b -l "$2" --cdw10="$2" --cdw11=${#1}; }
exist() { passthru 0x14 "$1" --cdw11=${#1}; }
delete() { passthru 0x10 "$1" --cdw11=${#1}; }

# list: the keys of the namespace, one per line and sorted, in /tmp/keys.
list() {
    passthru 0x06 "" --read -b -l 4096 --cdw10=4096 --cdw11=0 || return 1
    od -An -v -tu1 /tmp/out | awk '
        { for (i = 1; i <= NF; i++) byte[n++] = $i }
        END {
            count = byte[0] + 256 * byte[1] + 65536 * byte[2]
            at = 4
            for (k = 0; k < count; k++) {
                bytes = byte[at] + 256 * byte[at + 1]
                key = ""
                for (i = 0; i < bytes; i++) key = key sprintf("%c", byte[at + 2 + i] + 0)
                print key
                at += 2 + bytes
                at += (4 - at % 4) % 4
            }
        }' | sort >/tmp/keys
}

# refused_with STATUS COMMAND...: the command fails with this status (two hexadecimal digits) of the
# command-specific set 0; the flags "do not retry" and "more" may be set.
refused_with() {
    wanted=$1
    shift
    "$@" && fail "\"$*\" succeeded; status ${wanted}h was due"
    grep -Eq "\(0x([246]0)?$wanted\)" /tmp/out /tmp/err || fail "\"$*\" did not answer status ${wanted}h"
}

# completion_is BYTES: the completion's first dword, which nvme-cli prints as the result.
completion_is() {
    hex=$(printf %x "$1")
    grep -Eiq "result: *(0x)?0*$hex\$" /tmp/err || fail "the completion's first dword is not $1"
}

# holds KEY FILE: the key's value is exactly this file, and the completion says its length.
holds() {
    size=$(stat -c %s "$2")
    retrieve "$1" "$size" || fail "retrieving \"$1\" failed"
    completion_is "$size"
    cmp /tmp/out "$2" || fail "the value of \"$1\" differs from what was stored"
}

# keys_are KEY...: the listing names exactly these keys.
keys_are() {
    list || fail "the listing failed"
    for key in "$@"; do echo "$key"; done | sort >/tmp/wanted
    cmp /tmp/keys /tmp/wanted || fail "the listing is \"$(tr '\n' ' ' </tmp/keys)\", not \"$(tr '\n' ' ' </tmp/wanted)\""
}
