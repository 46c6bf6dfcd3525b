"""What `rdma-kv bench` measures: rows of a value and, where the project has one, its goal."""
