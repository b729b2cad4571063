#!/bin/sh
# Stands for the engine: each test says in the request what it is to do. Environment and arguments are the mounter's.
eval "$SCRIPT"
