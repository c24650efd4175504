#!/bin/sh
# The name run.sh has in the repository that its document belongs to.
exec sh "$(dirname "$0")/run.sh" "$@"
