# about: CPython's own test_os, test_io, test_shutil, test_posix, test_subprocess, test_mmap, test_fcntl, test by test
# packages: python3 libpython3.11-testsuite
# version: /usr/bin/python3 --version | cut -d' ' -f2
# limit: 1200
export TMPDIR=$W HOME=$W
# Debian leaves out what these need of the build (the tests of frozen modules); which of them fail is what is compared.
/usr/bin/python3 -m test --tempdir "$W" --junit-xml "$W/result.xml" -W --timeout 600 \
    test_os test_io test_shutil test_posix test_subprocess test_mmap test_fcntl >all 2>&1 || true
cat all >&2
/usr/bin/python3 - <<'P'
import xml.etree.ElementTree as tree, collections
counts = collections.Counter()
lines = []
for case in tree.parse("result.xml").getroot().iter("testcase"):
    inside = {child.tag for child in case}
    verdict = "FAILED" if inside & {"failure", "error"} else "skipped" if "skipped" in inside or case.get("result") == "skipped" else "passed"
    counts[verdict] += 1
    if verdict != "passed":
        lines.append(f"{verdict} {case.get('name')}")
print("\n".join(sorted(lines)))
print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("passed", "skipped", "FAILED")))
P
