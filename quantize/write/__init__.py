"""The checkpoint's folder: shards, index, configs, and the name it gets when it is whole."""
