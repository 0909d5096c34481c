#!/usr/bin/env python3
"""Reads a file of a union from its branches, without poolfs: docs/formats.md is all this knows.

upper.py UPPER LOWER PATH > content
"""

import os
import struct
import sys

BLOCK = 4096
SECTOR = 512


def crc32c_table():
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


TABLE = crc32c_table()


def crc32c(*pieces):
    crc = 0xFFFFFFFF
    for piece in pieces:
        for byte in piece:
            crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def attribute(path, name):
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError:
        return None


def check(condition, what):
    if not condition:
        sys.exit(f"upper.py: {what}")


class Plain:
    """A file that is stored as it is."""

    def __init__(self, path):
        self.file = open(path, "rb")
        self.size = os.fstat(self.file.fileno()).st_size

    def read(self, offset, length):
        return os.pread(self.file.fileno(), length, offset).ljust(length, b"\0")


class Compact(Plain):
    """A file of the format BCoW."""

    ENTRIES = 504

    def __init__(self, path, record):
        super().__init__(path)
        check(len(record) >= 64 and record[:4] == b"PFBC", "no record of a compact file")
        version, self.shift, levels = struct.unpack_from("<HBB", record, 4)
        check(version == 1 and levels in (0, 1, 2), "a record of another version")
        check(crc32c(record[:60], bytes(4), record[64:]) == struct.unpack_from("<I", record, 60)[0], "a record with a wrong sum")
        self.tag, self.size, self.limit = struct.unpack_from("<QQQ", record, 8)
        first, blocks = struct.unpack_from("<II", record, 32)
        (count,) = struct.unpack_from("<H", record, 42)
        check(len(record) == 64 + 8 * count and count <= (0 if levels else 40), "a record with a wrong number of places")
        self.tables = {}
        if levels == 0:
            self.take_places(struct.iter_unpack("<II", record[64:]))
            self.places = {}
        elif levels == 1:
            self.places = {0: 0}
        else:
            root = [self.table(True, number, first + number) for number in range(blocks)]
            self.places = {at * self.ENTRIES + entry: block for at, table in enumerate(root) for entry, block in table.items()}

    def take_places(self, places):
        """Has the places of a record in tables, as if they stood there."""
        places = list(places)
        units, blocks = [place[0] for place in places], sorted(place[1] for place in places)
        check(all(a < b for a, b in zip(units, units[1:] + [1024 * self.ENTRIES**2])), "places in another order, or of no unit")
        check(all(b - a >= 1 << self.shift - 12 for a, b in zip(blocks, blocks[1:])) and 0 not in blocks, "places that overlap")
        for unit, block in places:
            number, entry = divmod(unit, self.ENTRIES)
            self.tables.setdefault(number, {})[entry] = block

    def table(self, is_root, number, block):
        seed = struct.pack("<QQ", self.tag, number | is_root << 63)
        entries = {}
        content = super().read(block * BLOCK, BLOCK)
        for sector in range(BLOCK // SECTOR):
            piece = content[sector * SECTOR : (sector + 1) * SECTOR]
            if not any(piece):
                continue
            check(piece[504:508] == b"PFBT", "no sector of a table")
            check(crc32c(seed, struct.pack("<Q", self.ENTRIES + sector), piece[:504]) == struct.unpack_from("<I", piece, 508)[0], "a sector with a wrong sum")
            for place in range(63):
                entry = sector * 63 + place
                block, seal = struct.unpack_from("<II", piece, place * 8)
                if block:
                    check(crc32c(seed, struct.pack("<QI", entry, block)) == seal, "an entry with a wrong sum")
                    entries[entry] = block
        return entries

    def read(self, offset, length):
        content = b""
        while len(content) < length:
            at = offset + len(content)
            unit = at >> self.shift
            number, entry = divmod(unit, self.ENTRIES)
            within = at % (1 << self.shift)
            piece = min(length - len(content), (1 << self.shift) - within)
            if number not in self.tables:
                self.tables[number] = self.table(False, number, self.places[number]) if number in self.places else {}
            block = self.tables[number].get(entry)
            bytes_of_unit = super().read(block * BLOCK + within, piece) if block and at < self.limit else bytes(piece)
            content += bytes_of_unit[: max(0, self.limit - at)].ljust(piece, b"\0")
        return content


def stored(path):
    record = attribute(path, "trusted.poolfs.bcow")
    return Compact(path, record) if record else Plain(path)


def moved_blocks(upper, record):
    """Which blocks of a sketch have moved."""
    path = os.path.join(upper, ".poolfs/bitmaps", record[8:24].hex())
    moved = set()
    if not struct.unpack_from("<H", record, 6)[0] & 1 and not os.path.exists(path):
        return moved
    bitmap = stored(path)
    for number in range((bitmap.size + SECTOR - 1) // SECTOR):
        sector = bitmap.read(number * SECTOR, SECTOR)
        if not any(sector):
            continue
        check(sector[:4] == b"PFBM" and sector[8:24] == record[8:24], "a bitmap of another sketch")
        check(crc32c(sector[:28], bytes(4), sector[32:]) == struct.unpack_from("<I", sector, 28)[0], "a bitmap with a wrong sum")
        for byte, bits in enumerate(sector[32:]):
            moved.update(number * 3840 + byte * 8 + bit for bit in range(8) if bits >> bit & 1)
    return moved


def main():
    upper, lower, name = sys.argv[1:]
    path = os.path.join(upper, name)
    if not os.path.lexists(path):
        sys.stdout.buffer.write(open(os.path.join(lower, name), "rb").read())
        return
    top = stored(path)
    sketch = attribute(path, "trusted.poolfs.sketch")
    if not sketch:
        sys.stdout.buffer.write(top.read(0, top.size))
        return
    check(sketch[:4] == b"PFSK" and crc32c(sketch[:60], bytes(4)) == struct.unpack_from("<I", sketch, 60)[0], "no record of a sketch")
    limit, _, epoch = struct.unpack_from("<QQQ", sketch, 24)
    check(epoch % 2 == 0, "a truncation is under way")
    moved = moved_blocks(upper, sketch)
    below = Plain(os.path.join(lower, name))
    for block in range((top.size + BLOCK - 1) // BLOCK):
        start = block * BLOCK
        length = min(BLOCK, top.size - start)
        if block in moved or block >= (limit + BLOCK - 1) // BLOCK:
            content = top.read(start, length)
        else:
            content = below.read(start, length)[: max(0, limit - start)].ljust(length, b"\0")
        sys.stdout.buffer.write(content)


main()
