# shellcheck shell=dash
# The first host: the life of keys, iterators, then what nvme-cli says of the controller, then it meets the second host.
# shellcheck source=guest/lib.sh
. /lib.sh
# shellcheck source=tests/kernel/keys-lib.sh
. /keys-lib.sh
# shellcheck source=tests/kernel/blocks-lib.sh
. /blocks-lib.sh
# shellcheck source=tests/kernel/keys.sh
. /keys.sh
# shellcheck disable=SC2119 # No options wanted.
connect
# shellcheck source=tests/kernel/keys-liberal.sh
. /keys-liberal.sh
# shellcheck source=tests/kernel/iterators.sh
. /iterators.sh
# shellcheck source=tests/kernel/admin.sh
. /admin.sh
# shellcheck source=tests/kernel/meet.sh
. /meet.sh
disconnect
