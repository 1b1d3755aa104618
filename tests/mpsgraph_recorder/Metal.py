"""Replacement for PyObjC's `Metal` on Linux: a device, a queue, and buffers of bytes."""

MTLResourceStorageModeShared = 0


class Buffer:
    """An MTLBuffer whose memory CPU and GPU share."""

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
