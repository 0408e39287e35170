"""Reading traces of torch.profiler: whose time is it, and when does nothing run?"""
