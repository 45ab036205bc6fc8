"""Makes docs/status.png: the page of a server in the middle of an update.

    picture.py FOLDER-WITH-THE-PROGRAMS FILE
"""

import shutil
import sys
import tempfile

import live_server
from playwright.sync_api import sync_playwright


def main():
    programs, file = sys.argv[1:]
    folder = tempfile.mkdtemp(prefix="carryover-picture-")
    server = live_server.LiveServer(programs, folder, "hold_out_rate: 0")
    try:
        server.update(share=30)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(server.url)
            server.ask(16)
            server.force("open", task="qa")
            for _ in range(34):
                server.ask(1)
                page.wait_for_timeout(100)  # playwright's events, and with them the page, only run in here
            page.wait_for_timeout(2500)
            page.screenshot(path=file, full_page=True, clip={"x": 0, "y": 0, "width": 1280, "height": 1040})
            browser.close()
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
