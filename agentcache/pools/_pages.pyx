# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The page allocator, compiled. What each call means is said in `pages_reference`, its reference.

Free pages are bits: one word says which of 64 pages are free, one word above which of 64 such words
have any, so that the lowest and the highest free page are found in a handful of steps.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyObject_GetBuffer, PyBuffer_Release
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport INT32_MAX, int32_t, uint64_t

import numpy as np

cdef extern from *:
    """
    static inline int lowest_bit(unsigned long long word) { return __builtin_ctzll(word); }
    static inline int highest_bit(unsigned long long word) { return 63 - __builtin_clzll(word); }
    """
    int lowest_bit(uint64_t word) nogil
    int highest_bit(uint64_t word) nogil

cdef uint64_t ONE = 1
cdef uint64_t ALL = 0xFFFFFFFFFFFFFFFF
cdef object INT32 = np.dtype(np.int32)
cdef object empty = np.empty
cdef object NOTHING = np.empty(0, dtype=np.int32)
NOTHING.flags.writeable = False


cdef class _Ints:
    """The memory of an int32 array while it is looked at."""

    cdef Py_buffer buffer
    cdef int32_t* at
    cdef Py_ssize_t count

    def __cinit__(self, object array, bint writable=False):
        PyObject_GetBuffer(array, &self.buffer, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        if self.buffer.itemsize != 4:
            PyBuffer_Release(&self.buffer)
            raise TypeError(f"pages are int32, not items of {self.buffer.itemsize} bytes")
        self.at = <int32_t*> self.buffer.buf
        self.count = self.buffer.len // 4

    def __dealloc__(self):
        PyBuffer_Release(&self.buffer)


cdef class PageAllocator:
    """Reference counts over pages `0..num_pages-1`, whatever the pages hold."""

    cdef dict __dict__  # calls can be replaced on an instance, as on the reference's
    cdef readonly Py_ssize_t num_pages
    cdef readonly object refs
    cdef readonly object fill
    cdef readonly Py_ssize_t num_free
    cdef _Ints _held_refs
    cdef _Ints _held_fill
    cdef int32_t* _refs
    cdef int32_t* _fill
    cdef uint64_t* _free
    cdef uint64_t* _any
    cdef Py_ssize_t _num_words
    cdef Py_ssize_t _num_tops

    def __cinit__(self, Py_ssize_t num_pages):
        cdef Py_ssize_t page
        self.num_pages = self.num_free = num_pages
        self.refs = np.zeros(num_pages, dtype=INT32)
        self.fill = np.zeros(num_pages, dtype=INT32)
        self._held_refs = _Ints(self.refs, True)
        self._held_fill = _Ints(self.fill, True)
        self._refs, self._fill = self._held_refs.at, self._held_fill.at
        self._num_words = (num_pages + 63) >> 6
        self._num_tops = (self._num_words + 63) >> 6
        self._free = <uint64_t*> PyMem_Calloc(self._num_words + 1, sizeof(uint64_t))
        self._any = <uint64_t*> PyMem_Calloc(self._num_tops + 1, sizeof(uint64_t))
        if self._free == NULL or self._any == NULL:
            raise MemoryError
        for page in range(num_pages):
            self._put(page)

    def __dealloc__(self):
        PyMem_Free(self._free)
        PyMem_Free(self._any)

    @property
    def num_used(self):
        """Pages somebody holds."""
        return self.num_pages - self.num_free

    cdef inline void _put(self, Py_ssize_t page) noexcept:
        self._free[page >> 6] |= ONE << (page & 63)
        self._any[page >> 12] |= ONE << ((page >> 6) & 63)

    cdef inline void _take(self, Py_ssize_t page) noexcept:
        """Make a free page held, once."""
        cdef Py_ssize_t word = page >> 6
        self._free[word] &= ~(ONE << (page & 63))
        if not self._free[word]:
            self._any[word >> 6] &= ~(ONE << (word & 63))
        self._refs[page] = 1
        self._fill[page] = INT32_MAX

    cdef inline bint _is_free(self, Py_ssize_t page) noexcept:
        return (self._free[page >> 6] >> (page & 63)) & 1

    cdef Py_ssize_t _lowest(self) noexcept:
        cdef Py_ssize_t top = 0, word
        while not self._any[top]:
            top += 1
        word = (top << 6) + lowest_bit(self._any[top])
        return (word << 6) + lowest_bit(self._free[word])

    cdef Py_ssize_t _highest(self) noexcept:
        cdef Py_ssize_t top = self._num_tops - 1, word
        while not self._any[top]:
            top -= 1
        word = (top << 6) + highest_bit(self._any[top])
        return (word << 6) + highest_bit(self._free[word])

    def alloc(self, Py_ssize_t count, Py_ssize_t after=-1):
        """`count` pages with one reference each, following page `after` where those are free."""
        cdef Py_ssize_t got = 0, page
        if count > self.num_free:
            return None
        if count <= 0:
            return empty(0, INT32)
        out = empty(count, INT32)
        cdef _Ints pages = _Ints(out, True)
        page = after + 1 if after >= 0 else self._lowest()
        while True:
            while got < count and page < self.num_pages and self._is_free(page):
                self._take(page)
                pages.at[got] = <int32_t> page
                got += 1
                page += 1
            if got == count:
                break
            page = self._lowest()
        self.num_free -= count
        return out

    def alloc_scattered(self, Py_ssize_t count):
        """Like `alloc`, from the other end and in no order: for data that is copied before use."""
        cdef Py_ssize_t got, page
        if count > self.num_free:
            return None
        out = empty(max(count, 0), INT32)
        cdef _Ints pages = _Ints(out, True)
        page = -1
        for got in range(count):
            if page < 0 or not self._is_free(page):
                page = self._highest()
            self._take(page)
            pages.at[got] = <int32_t> page
            page -= 1
        self.num_free -= pages.count
        return out

    def incref(self, object held):
        """One more holder of each page; all must be held."""
        cdef _Ints pages = _Ints(held)
        cdef Py_ssize_t idx
        for idx in range(pages.count):
            assert self._is_held(pages.at[idx]), "a reference to a free page"
        for idx in range(pages.count):
            self._refs[pages.at[idx]] += 1

    def decref(self, object held):
        """One holder fewer of each page; returns those that became free."""
        cdef _Ints pages = _Ints(held), free = None
        cdef Py_ssize_t idx, num_gone = 0
        cdef int32_t page
        gone = NOTHING
        for idx in range(pages.count):
            assert self._is_held(pages.at[idx]), "a page was given back twice"
        for idx in range(pages.count):
            page = pages.at[idx]
            assert self._refs[page], "a page was given back twice"
            self._refs[page] -= 1
            if not self._refs[page]:
                if free is None:
                    gone = empty(pages.count, INT32)
                    free = _Ints(gone, True)
                self._put(page)
                free.at[num_gone] = page
                num_gone += 1
                self.num_free += 1
        return gone[:num_gone]

    cdef inline bint _is_held(self, int32_t page) noexcept:
        return 0 <= page < self.num_pages and self._refs[page] > 0

    def claim(self, Py_ssize_t page, Py_ssize_t offset):
        """Take the rest of a page from `offset` on, if nobody wrote there; one more holder then."""
        assert 0 <= page < self.num_pages, f"no page {page}"
        if self._fill[page] != offset:
            return False
        self._fill[page] = INT32_MAX
        self._refs[page] += 1
        return True

    def disclaim(self, Py_ssize_t page, Py_ssize_t offset):
        """Give back the rest of a claimed or own page from `offset` on, for a later `claim`."""
        assert 0 <= page < self.num_pages, f"no page {page}"
        self._fill[page] = <int32_t> offset


def run_starts(object pages):
    """Indices at which a run of neighbouring, ascending pages begins."""
    cdef _Ints ints = _Ints(pages)
    cdef Py_ssize_t idx
    cdef list out = [0] if ints.count else []
    for idx in range(1, ints.count):
        if ints.at[idx] != ints.at[idx - 1] + 1:
            out.append(idx)
    return out
