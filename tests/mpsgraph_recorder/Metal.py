"""Linux replacement for PyObjC's `Metal`, for tests: a device, a command queue, and buffers that hold bytes."""

MTLResourceStorageModeShared = 0


class Buffer:
    """An MTLBuffer in memory that CPU and GPU share."""

    def __init__(self, data):
        self.data = bytearray(data)

    def contents(self):
        return self

    def as_buffer(self, count):
        return memoryview(self.data)[:count]


class Device:
    def newBufferWithBytes_length_options_(self, data, length, options):
        assert isinstance(data, bytes) and len(data) == length and options == MTLResourceStorageModeShared
        return Buffer(data)

    def newCommandQueue(self):
        return "queue"


def MTLCreateSystemDefaultDevice():
    return Device()
