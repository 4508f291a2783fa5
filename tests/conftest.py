"""What holds for every test."""

import os

# Before anything imports gRPC. Where another thread is in a call, its fork handlers end the child
# of a fork before it becomes the program it was made for (56 of 764 children). Ray starts its
# processes by fork, and so do tests that set a child's signals; whoever forks here runs a program.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
