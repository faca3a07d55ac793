"""On the import path of servers whose interpreter may not have skyctl (`python:`). Keep it small:
everything here can be imported there by its bare name.
"""
