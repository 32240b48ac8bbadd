# shellcheck shell=dash
# One function per Key Value command, through `nvme io-passthru` on the generic character device $device, as a
# user without SPDK would send them. Needs lib.sh.

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
