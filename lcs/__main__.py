from lcs.cli import main

main()
