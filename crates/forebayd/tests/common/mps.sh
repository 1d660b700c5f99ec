#!/bin/sh
# A stand-in for nvidia-cuda-mps-control: lives as long, starts a server when it is started, ends when it is told to.
P="$CUDA_MPS_PIPE_DIRECTORY"
case "$1" in
-f) env > "$CUDA_MPS_LOG_DIRECTORY/environment"
    sleep 600 & server=$!
    echo $server > "$P/server"; echo $$ > "$P/daemon"
    rm -f "$P/control"; mkfifo "$P/control"
    trap 'kill $server; rm -f "$P/control"' EXIT
    while read command < "$P/control"; do [ "$command" = quit ] && exit 0; done ;;
*)  cat > "$P/control" ;;
esac
